"""The comparison at startup: detected differences, skipped cases, and stored results."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.olmo2 import modeling_olmo2

from pagemill.engine.builder import describe_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.errors import ConfigError, ModelLoadError
from pagemill.engine.execution import model_probe
from pagemill.engine.execution.model_runner import ModelRunner
from pagemill.engine.llm import LLM
from pagemill.engine.models.verified import is_verified, remember_verified
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.generic.tiny_configs import tiny_config
from tests.engine.models.generic.trial import build, write_checkpoint

DIFFERS = "model type 'olmo2' is not supported: the logits differ from transformers' by"


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("olmo2")
    write_checkpoint(build("olmo2", tiny_config("olmo2", 0)), directory)
    return directory


def load(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), num_threads=1, **({"num_kv_blocks": 64, "block_size": 4} | options))


def test_a_model_that_mixes_its_batch_is_refused(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token depends on the one before it, which in a packed batch may belong to another sequence."""
    forward = modeling_olmo2.Olmo2MLP.forward
    monkeypatch.setattr(
        modeling_olmo2.Olmo2MLP, "forward", lambda self, x: forward(self, x + 0.1 * x.roll(1, dims=1))
    )
    with pytest.raises(ModelLoadError, match=DIFFERS):
        load(olmo2)
    load(olmo2, verify=False)


def test_a_model_without_numbers_is_refused(olmo2: Path, tmp_path: Path) -> None:
    tensors = load_file(olmo2 / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    (tmp_path / "config.json").write_text((olmo2 / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{DIFFERS} nan"):
        load(tmp_path)


def test_code_that_fails_is_one_line(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("nothing here")

    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", fail)
    with pytest.raises(ModelLoadError, match="'olmo2' is not supported: the forward pass fails"):
        load(olmo2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"},
        {"max_model_len": 3}, {"max_model_len": 1, "block_size": 1}, {"pad_to_bucket": True},
    ],
    ids=str,
)  # fmt: skip
def test_settings_pass(olmo2: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        load(olmo2, **options)
    assert any("equals transformers' own forward pass" in message for message in caplog.messages)


@pytest.mark.slow
def test_a_comparison_is_made_once(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    check = model_probe.ModelProbe.check
    monkeypatch.setattr(
        model_probe.ModelProbe, "check", lambda self, shape: (compared.append(self), check(self, shape))
    )
    load(olmo2)
    load(olmo2)
    assert len(compared) == 1
    load(olmo2, dtype="bfloat16")  # another function
    assert len(compared) == 2


@pytest.mark.slow
def test_a_refusal_is_not_remembered(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(model_probe.ModelProbe, "_difference", lambda *_: 1.0)
        for _ in range(2):
            with pytest.raises(ModelLoadError, match=DIFFERS):
                load(olmo2)
    load(olmo2)


@pytest.mark.slow
def test_what_is_remembered_is_bounded(cache_directory: Path) -> None:
    for number in range(300):
        remember_verified(str(number))
    entries = list((cache_directory / "verified").iterdir())
    assert len(entries) == 256
    assert not any(entry.stat().st_size for entry in entries)
    assert is_verified("299")
    old = time.time() - 31 * 86_400
    for entry in entries:
        os.utime(entry, (old, old))
    assert not is_verified("299")
    remember_verified("new")
    assert len(list((cache_directory / "verified").iterdir())) == 1


def test_a_cache_that_is_no_directory_costs_only_the_comparison(olmo2: Path, cache_directory: Path) -> None:
    cache_directory.write_text("a file")
    load(olmo2)
    load(olmo2)


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"tensor_parallel_size": 2}], ids=str)
def test_promises_that_are_not_shown_are_refused(olmo2: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not supported for model type 'olmo2'"):
        load(olmo2, **options)


def test_an_outline_says_what_stays_transformers_own(olmo2: Path) -> None:
    told = describe_model(EngineConfig(model=str(olmo2), skip_tokenizer_init=True))
    assert told.startswith("compiled: nothing; ")
    assert "transformers' own: forward pass, decoder layers, attention, MLP, norms" in told


def test_scores_and_choices_are_those_of_the_model(olmo2: Path) -> None:
    """Prompt logprobs bypass the head, choices use a part of it."""
    llm = load(olmo2)
    prompt = list(range(1, 12))
    scored = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[0]
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(prompt)
    greedy = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    best = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids[0]
    allowed = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=(best, (best + 1) % 97))
    assert llm.generate([prompt], allowed, use_tqdm=False)[0].outputs[0].token_ids == [best]


def test_a_model_that_no_graph_captures_runs_without(
    olmo2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    monkeypatch.setattr(ModelRunner, "_new_graphs", fail)
    assert load(olmo2).generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert any("runs without CUDA graphs" in message for message in caplog.messages)
