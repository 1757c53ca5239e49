"""Any fields in jobs side by side, on any kind of model: each result is the same as alone; the engine survives."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.llm import LLM
from tests.engine.combinations.drawn_jobs import TOKENIZER, difference, draw, run
from tests.engine.models.generic.tiny_configs import tiny_config
from tests.engine.models.generic.trial import build, write_checkpoint
from tests.engine.tiny_model import save_tiny_llama, save_tiny_ministral

ROOMY: dict[str, Any] = {
    "num_threads": 1, "block_size": 4, "device": "cpu", "dtype": "float32", "max_model_len": 160, "num_kv_blocks": 600,
}  # fmt: skip
ALONE = {"num_speculative_tokens": 0, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
SETTINGS: dict[str, dict[str, Any]] = {
    "preempted": {"num_kv_blocks": 90, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    "host tier": {
        "num_kv_blocks": 90,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "host_cache_gib": 0.01,
    },
    "drafts": {"num_kv_blocks": 90, "num_speculative_tokens": 6, "max_num_batched_tokens": 20},
    "overlapped": {"num_kv_blocks": 120, "async_scheduling": True, "max_num_batched_tokens": 24},
    "invariant": {"num_kv_blocks": 120, "batch_invariant": True, "max_num_batched_tokens": 48},
    "two ranks": {"num_kv_blocks": 120, "tensor_parallel_size": 2},
    "large blocks": {"block_size": 16, "num_kv_blocks": 40, "long_prefill_token_threshold": 5},
}
MODELS = ("llama", "windows", "qwen3_moe", "mixtral", "deepseek_v3", "gpt2")
QUICK = {("qwen3_moe", "drafts"), ("deepseek_v3", "host tier")}
REFUSED = {("deepseek_v3", "invariant"), ("deepseek_v3", "two ranks")}
"""At startup, with its name."""
NUM_JOBS = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def saved(kind: str) -> Path:
        directory = tmp_path_factory.mktemp(kind)
        size, eos = TOKENIZER.vocab_size, TOKENIZER.eos_token_id
        if kind == "llama":
            save_tiny_llama(directory, vocab_size=size, eos=(eos,), std=0.3)
        elif kind == "windows":
            layers = ["sliding_attention", "full_attention"]
            save_tiny_ministral(directory, layers, std=0.3, vocab_size=size, eos=(eos,))
        else:
            tokens = {"vocab_size": size, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None}
            positions = {"max_position_embeddings": 256, "n_positions": 256}
            write_checkpoint(build(kind, tiny_config(kind, 0) | tokens | positions), directory)
        (directory / "tokenizer.json").write_text(TOKENIZER.to_json())
        (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return directory

    @cache
    def alone(kind: str, seed: int) -> Any:
        llm = LLM(str(saved(kind)), **ROOMY | ALONE)
        return run(llm.engine, draw(seed, NUM_JOBS), at_once=1)

    return saved, alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        pytest.param(kind, setting, marks=[] if (kind, setting) in QUICK else [pytest.mark.slow])
        for kind in MODELS
        for setting in SETTINGS
        if (kind, setting) not in REFUSED
    ],
)
def test_each_job_gives_what_it_gives_alone(folders: Any, kind: str, setting: str, seed: int) -> None:
    saved, alone = folders
    wanted = alone(kind, seed)
    assert sum(each.error is None for each in wanted) > NUM_JOBS // 2
    jobs = draw(seed, NUM_JOBS)
    llm = LLM(str(saved(kind)), **ROOMY | SETTINGS[setting])
    found = run(llm.engine, jobs, at_once=12)
    llm.close()  # the processes of its schemas, of which this file's engines would have hundreds
    for job, one, other in zip(jobs, wanted, found, strict=True):
        told = difference(one, other)
        assert told is None, f"{told}\n{json.dumps(job.fields, default=str)}\n{job}"
