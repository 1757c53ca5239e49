"""Rotary scaling: exact for every type, and no output depends on a neighbor's length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.errors import ConfigError, ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.mixture_cases import phi_moe
from tests.engine.models.families.native_cases import GEMMA3, GEMMA_NORM_MEAN, LLAMA, PHI3
from tests.engine.models.families.tiny import NUM_OUTPUT_TOKENS, VOCAB_SIZE, TinyCheckpoint, native_checkpoint

TRAINED = 32
STRETCHED = 128
HALF_HEAD = 8
SHORT_FACTOR = [1.0 + 0.05 * i for i in range(HALF_HEAD)]
LONG_FACTOR = [1.0 + 0.4 * i for i in range(HALF_HEAD)]
SHORT, LONG = ([(5 * i + 2) % VOCAB_SIZE for i in range(n)] for n in (7, 90))
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT_FACTOR,
    "long_factor": LONG_FACTOR,
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC = {"type": "dynamic", "factor": 4.0}


def llama(rope_scaling: dict[str, Any] | None, **fields: Any) -> TinyCheckpoint:
    config = LLAMA | {"max_position_embeddings": STRETCHED, "rope_scaling": rope_scaling} | fields
    return native_checkpoint(config)


def dynamic_base(length: int, trained: int, factor: float, head_dim: int = 2 * HALF_HEAD) -> float:
    """NTK-aware scaling as originally proposed: the base for sequences of `length` tokens."""
    stretch = factor * length / trained - (factor - 1)
    return float(10000.0 * stretch ** (head_dim / (head_dim - 2)))


def run(directory: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    settings = {"num_kv_blocks": 96, "block_size": 4, "max_num_batched_tokens": 48} | options
    llm = LLM(str(directory), num_threads=1, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("rope", [LINEAR, YARN, LLAMA3], ids=lambda rope: rope.get("rope_type", "linear"))
def test_types_that_do_not_depend_on_length(rope: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = llama(rope)
    expected = [checkpoint.complete(prompt) for prompt in (SHORT, LONG)]
    assert expected != [llama(None).complete(prompt) for prompt in (SHORT, LONG)]
    assert run(checkpoint.write(tmp_path), [SHORT, LONG]) == expected


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        (LINEAR | {"factor": 1e308}, "factor"), (DYNAMIC | {"factor": 1e308}, "factor"),
        (YARN | {"factor": float("inf")}, "factor"), (LLAMA3 | {"factor": float("nan")}, "factor"),
        (LINEAR | {"factor": 0.0}, "factor"), (LLAMA3 | {"low_freq_factor": 1e308}, "low_freq_factor"),
        (LONGROPE | {"long_factor": [1e308] * HALF_HEAD}, "long_factor"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(rope: dict[str, Any], name: str, tmp_path: Path) -> None:
    directory = llama(LINEAR).write(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "rope_parameters"} | {
        "rope_scaling": rope
    }
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{name}"):
        LLM(str(directory), num_threads=1)


def test_longrope_takes_the_short_table_where_nothing_can_be_longer(tmp_path: Path) -> None:
    checkpoint = llama(LONGROPE)
    directory = checkpoint.write(tmp_path)
    assert run(directory, [SHORT], max_model_len=TRAINED) == [checkpoint.complete(SHORT)]


@pytest.mark.slow
def test_longrope_takes_the_long_table_for_everybody_where_something_can(tmp_path: Path) -> None:
    directory = llama(LONGROPE).write(tmp_path)
    # transformers' choice for a sequence beyond the trained length, also for the short one.
    reference = llama(LONGROPE | {"short_factor": LONG_FACTOR})
    expected = [reference.complete(prompt) for prompt in (SHORT, LONG)]
    assert run(directory, [SHORT, LONG]) == expected
    assert run(directory, [LONG, SHORT], max_num_batched_tokens=256) == expected[::-1]
    assert run(directory, [SHORT]) == expected[:1], "alone as beside the long one"
    assert llama(LONGROPE).complete(SHORT) != expected[0], "the tables must differ enough to tell"


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_phi3_longrope(name: str, tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR}
    config = PHI3 | {
        "max_position_embeddings": STRETCHED,
        "original_max_position_embeddings": TRAINED,
        "sliding_window": 60,
    }
    original = native_checkpoint(config | {"rope_scaling": rope})
    for_long = native_checkpoint(config | {"rope_scaling": rope | {"short_factor": LONG_FACTOR}})
    # The first release's name for it, which transformers no longer reads.
    directory = replace(original, config=config | {"rope_scaling": rope | {"type": name}}).write(tmp_path)
    assert run(directory, [SHORT, LONG]) == [for_long.complete(prompt) for prompt in (SHORT, LONG)]
    assert run(directory, [SHORT], max_model_len=TRAINED) == [original.complete(SHORT)]


@pytest.mark.slow
def test_phi_moe_longrope(tmp_path: Path) -> None:
    """Its factors are given, and chosen like the table."""

    def phi(rope: dict[str, Any]) -> TinyCheckpoint:
        fields = {"original_max_position_embeddings": TRAINED, "max_position_embeddings": STRETCHED}
        return phi_moe(**fields, rope_scaling=rope)

    rope = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4}
    original, for_long = phi(rope), phi(rope | {"short_factor": LONG_FACTOR, "short_mscale": 1.4})
    directory = original.write(tmp_path)
    assert run(directory, [SHORT], max_model_len=TRAINED) == [original.complete(SHORT)]
    expected = [for_long.complete(prompt) for prompt in (SHORT, LONG)]
    assert run(directory, [SHORT, LONG]) == expected
    assert run(directory, [SHORT]) == expected[:1], "alone as beside the long one"
    assert original.complete(SHORT) != expected[0], "the tables must differ enough to tell"


def test_dynamic_is_the_identity_up_to_the_trained_length(tmp_path: Path) -> None:
    checkpoint = llama(DYNAMIC)
    plain = llama(None)
    directory = checkpoint.write(tmp_path)
    assert run(directory, [SHORT, LONG]) == [plain.complete(prompt) for prompt in (SHORT, LONG)]


def test_dynamic_scales_for_the_longest_sequence_that_is_served(tmp_path: Path) -> None:
    directory = llama(DYNAMIC, max_position_embeddings=TRAINED).write(tmp_path)
    base = dynamic_base(STRETCHED, TRAINED, DYNAMIC["factor"])
    reference = llama(None, rope_theta=base)
    expected = [reference.complete(prompt) for prompt in (SHORT, LONG)]
    assert run(directory, [SHORT, LONG], max_model_len=STRETCHED) == expected
    assert run(directory, [SHORT], max_model_len=STRETCHED) == expected[:1], "alone as beside the long one"
    assert llama(None).complete(SHORT) != expected[0], "the scaling must differ enough to tell"


def test_frequencies_per_type_of_layer(tmp_path: Path) -> None:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    }
    fields = {
        name: value
        for name, value in GEMMA3.items()
        if name not in ("rope_theta", "rope_local_base_freq", "rope_scaling")
    }
    config = fields | {"head_dim": 2 * HALF_HEAD, "max_position_embeddings": TRAINED}
    directory = native_checkpoint(config | {"rope_parameters": ropes}, norm_mean=GEMMA_NORM_MEAN).write(
        tmp_path
    )
    scaled = {"rope_type": "default", "rope_theta": dynamic_base(100, TRAINED, 4.0)}
    reference = native_checkpoint(
        config | {"rope_parameters": ropes | {"full_attention": scaled}, "max_position_embeddings": 100},
        norm_mean=GEMMA_NORM_MEAN,
    )
    expected = [reference.complete(prompt) for prompt in (SHORT, LONG)]
    assert run(directory, [SHORT, LONG], max_model_len=100) == expected


@pytest.mark.parametrize(
    ("rope", "trained", "longest"),
    [
        (LINEAR, 32, 128),
        (DYNAMIC, 32, 128),
        (YARN, 32, 128),
        (YARN, 128, 128),
        (LLAMA3, 128, 128),
        (None, 128, 128),
    ],
    ids=["linear", "dynamic", "yarn", "yarn, stretched already", "llama3", "none"],
)
def test_longest_context(rope: dict[str, Any] | None, trained: int, longest: int, tmp_path: Path) -> None:
    directory = llama(rope, max_position_embeddings=trained).write(tmp_path)
    assert LLM(str(directory), num_kv_blocks=8).engine.limits.max_model_len == trained
    assert LLM(str(directory), num_kv_blocks=8, max_model_len=longest).engine.limits.max_model_len == longest
    with pytest.raises(ConfigError, match=f"past the model's context of {longest}"):
        LLM(str(directory), num_kv_blocks=8, max_model_len=longest + 1)


@pytest.mark.slow
def test_fingerprint_tells_apart_what_rotates_differently(tmp_path: Path) -> None:
    def fingerprint(directory: Path, max_model_len: int) -> str:
        return LLM(str(directory), num_kv_blocks=8, max_model_len=max_model_len).engine.fingerprint

    longrope = llama(LONGROPE).write(tmp_path / "longrope")
    assert fingerprint(longrope, TRAINED) != fingerprint(longrope, STRETCHED)
    plain = llama(None).write(tmp_path / "plain")
    assert fingerprint(plain, TRAINED) == fingerprint(plain, STRETCHED)
