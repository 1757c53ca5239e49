"""A model that computes NaN for one request fails that request, without effects on the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.native_cases import write_llama

POISON = 50
PROMPTS = [[1, 2, 3, 4, 5], [6, POISON, 8, 9, 10, 11, 12], [13, 14], [1, 2, 3, POISON], [15] * 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of one token is NaN."""
    directory = write_llama(tmp_path_factory.mktemp("poisoned"), tie_word_embeddings=False)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(str(checkpoint), block_size=4, max_model_len=32, num_threads=1, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 3},
        {"pad_to_bucket": True, "async_scheduling": True},
        {"enable_prefix_caching": False, "async_scheduling": True},
    ],
    ids=str,
)
def test_only_the_poisoned_requests_fail(checkpoint: Path, options: dict[str, Any]) -> None:
    # A healthy request that sampled POISON would poison itself.
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={POISON: -1e4})
    healthy = [prompt for prompt in PROMPTS if POISON not in prompt]
    alone = make_llm(checkpoint, num_kv_blocks=64)
    expected = [alone.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in healthy]
    llm = make_llm(checkpoint, num_kv_blocks=20, **options)
    for _ in range(2):  # the second time in blocks that held NaN
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        outputs = [r.outputs[0] for r in results]
        assert [o.finish_reason == "error" for o in outputs] == [POISON in prompt for prompt in PROMPTS]
        assert [o.token_ids for o in outputs if o.finish_reason != "error"] == expected
        assert all("not finite" in (r.error or "") for r in results if POISON in r.prompt_token_ids)
    assert llm.engine.stats().scheduler.invalid_logits == 4
    assert llm.engine.stats().requests.finished["error"] == 4
    llm.engine.check_integrity()
