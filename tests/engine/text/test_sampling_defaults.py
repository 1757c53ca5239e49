"""A model's generation_config.json determines the settings that a request omits."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ConfigError, ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.runnable import reason_not_runnable
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from pagemill.engine.text.tokenizer import ByteTokenizer
from pagemill.producer.wire.schema.job import Job
from pagemill.worker.jobs.intake import processed
from tests.engine.tiny_model import save_tiny_llama

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return directory


def test_the_file_is_read(tmp_path: Path) -> None:
    content = {
        "do_sample": False, "temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "min_p": None,
        "repetition_penalty": 1.0, "max_new_tokens": 2048, "eos_token_id": [1, 2], "num_beams": 4,
    }  # fmt: skip
    found = read_sampling_defaults("auto", write(tmp_path, content))
    assert found == SamplingDefaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, 2048)
    assert str(found) == "temperature 0.6, top_k 20, top_p 0.95, max_tokens 2048"
    assert read_sampling_defaults("none", tmp_path) == NO_DEFAULTS
    other = write(tmp_path / "other", {"temperature": 0})
    assert read_sampling_defaults(str(other), tmp_path) == SamplingDefaults({"temperature": 0.0})


@pytest.mark.parametrize(
    "content", [None, {}, {"eos_token_id": 0}, {"temperature": 1, "top_k": 0, "top_p": 1.0}]
)
def test_there_may_be_none(content: Any, tmp_path: Path) -> None:
    if content is not None:
        write(tmp_path, content)
    assert not read_sampling_defaults("auto", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        "\ufffe",
        *(
            {name: value}
            for name in ("temperature", "top_k", "min_p", "max_new_tokens")
            for value in ("1", True, [], -2)
        ),
        {"top_p": 0},
        {"top_k": 1.5},
        '{"temperature": NaN}',
        '{"top_k": Infinity}',
        '{"max_new_tokens": 1e400}',
        '{"top_k": 1' + "0" * 400 + "}",
        {"repetition_penalty": 0},
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_file_that_no_request_could_follow_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_sampling_defaults("auto", write(tmp_path, content))


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    for given in (str(tmp_path), str(tmp_path / "missing"), "automatic"):
        with pytest.raises(ConfigError, match="auto, none or a folder"):
            EngineConfig(model="echo", generation_config=given)


def processor(defaults: SamplingDefaults, max_model_len: int = 1000) -> InputProcessor:
    limits = InputLimits(vocab_size=257, max_model_len=max_model_len, pool_tokens=500, max_num_seqs=4)
    made = InputProcessor(ByteTokenizer(), limits, defaults=defaults)
    return pickle.loads(pickle.dumps(made))  # as a worker in another process receives it


def params_of(defaults: SamplingDefaults, **fields: Any) -> SamplingParams:
    job = Job.from_payload(Job.parse({"model": "m", "seed": 1} | fields).to_payload())
    return processed(job, "id", processor(defaults))[1]


def test_a_job_gets_what_it_does_not_set() -> None:
    defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20}, 40)
    plain = params_of(defaults, prompt="Hi")
    assert (plain.temperature, plain.top_k, plain.top_p, plain.max_tokens) == (0.6, 20, 1.0, 16)
    own = params_of(defaults, prompt="Hi", temperature=1.0, top_k=0)
    assert own == params_of(NO_DEFAULTS, prompt="Hi")
    assert params_of(defaults, **CHAT).max_tokens == 40
    assert params_of(defaults, **CHAT, min_tokens=50).max_tokens == 50
    assert params_of(defaults, **CHAT, max_tokens=60).max_tokens == 60


def test_the_default_length_never_exceeds_the_context_or_the_pool() -> None:
    unlimited = params_of(NO_DEFAULTS, **CHAT).max_tokens
    assert unlimited is not None
    assert unlimited < 500
    assert params_of(SamplingDefaults(max_tokens=100_000), **CHAT).max_tokens == unlimited


def test_the_engine_samples_with_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_llama(tmp_path)
    write(tmp_path, {"top_k": 1, "temperature": 3.0})
    settings: dict[str, Any] = {
        "device": "cpu", "skip_tokenizer_init": True, "verify": False, "kv_cache_memory_bytes": 3_000_000,
    }  # fmt: skip
    prompt = [5, 6, 7]
    with caplog.at_level("INFO"):
        llm = LLM(str(tmp_path), **settings)
    assert "sample with the model's temperature 3, top_k 1" in caplog.text
    greedy = llm.generate([prompt], SamplingParams(temperature=0.0))[0].outputs[0].token_ids
    assert llm.default_sampling_params() == SamplingParams(temperature=3.0, top_k=1)
    assert llm.generate([prompt])[0].outputs[0].token_ids == greedy
    hot = replace(llm.default_sampling_params(), top_k=0)
    assert llm.generate([prompt], hot)[0].outputs[0].token_ids != greedy
    own = Engine.from_config(EngineConfig(model=str(tmp_path), generation_config="none", **settings))
    assert own.input_processor.defaults == NO_DEFAULTS
    assert own.fingerprint != llm.engine.fingerprint, "a checkpoint is continued with the same defaults alone"
    own.close()
    llm.close()


def test_models_names_a_file_that_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    assert reason_not_runnable(tmp_path) is None
    write(tmp_path, {"top_p": 2})
    assert "top_p must be in (0, 1]" in str(reason_not_runnable(tmp_path))
