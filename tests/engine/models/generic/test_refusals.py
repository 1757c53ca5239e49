"""Every `model_type` of transformers is supported, or rejected in one line of a known kind with an alternative."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families.multimodal import MULTIMODAL
from pagemill.engine.models.families.refusals import KINDS, kind_of
from pagemill.engine.models.families.registry import SUPPORTED_MODEL_TYPES, find_family
from pagemill.engine.pooling.families import FAMILIES as POOLING_FAMILIES
from pagemill.engine.runnable import check_config
from tests.engine.models.generic.sweep import stored_outcomes

_, OUTCOMES = stored_outcomes()
POOLED = {kind for family in POOLING_FAMILIES for kind in family.model_types}


def refusal(model_type: str, directory: Path) -> str | None:
    """Return the error for a config.json of this type with transformers' own sizes, before weights are read."""
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    try:
        check_config(directory)
    except ModelLoadError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_every_type_is_taken_or_refused_by_kind(tmp_path: Path) -> None:
    taken, kinds = set(), dict[str, set[str]]()
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        message = refusal(model_type, tmp_path)
        if message is None:
            taken.add(model_type)
            continue
        assert "\n" not in message
        if f"model type {model_type!r} lacks text_config" in message:
            assert model_type in MULTIMODAL
            continue
        if f"model type {model_type!r} lacks " in message or message.startswith("can't read "):
            # transformers' own sizes are missing, or rejected by transformers
            assert model_type in {*SUPPORTED_MODEL_TYPES, *OUTCOMES}
            continue
        assert message.startswith(f"model type {model_type!r} is not supported: "), message
        found = [kind.name for kind in KINDS if message.endswith(kind.advice)]
        assert len(found) == 1, message
        kinds.setdefault(found[0], set()).add(model_type)
    # Errors that are known only from the module are in the outcomes.
    assert taken <= {*SUPPORTED_MODEL_TYPES, *POOLED, *OUTCOMES}
    assert len(taken) > 100
    assert {"idefics", "florence2", "qwen2_audio", "paligemma"} <= kinds["images, audio or video"]
    assert {"t5", "bart", "whisper"} <= kinds["encoder-decoder"]
    assert {"jamba", "falcon_h1", "mamba", "qwen3_next"} <= taken
    assert {"rwkv", "xlstm"} <= kinds["recurrent state, or several models in one"]
    assert {"albert", "resnet", "vit"} <= kinds["no text generator"]


@pytest.mark.parametrize(
    "reason", sorted({outcome.refusal for outcome in OUTCOMES.values() if outcome.refusal is not None})
)
def test_what_a_start_refuses_has_a_kind(reason: str) -> None:
    assert kind_of(reason) is not None


def test_infinities_are_read_as_transformers_writes_them() -> None:
    config = {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert find_family(config).build_config(config).time_step_limit[1] == float("inf")


def test_a_type_is_refused_before_its_values(tmp_path: Path) -> None:
    """No model of this type can be served, regardless of its config.json."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "hidden_size": "many"}))
    with pytest.raises(ModelLoadError, match=r"model type 'rwkv' is not supported: .*use a model") as refused:
        check_config(tmp_path)
    assert "many" not in str(refused.value)


def test_a_bad_value_of_a_type_that_can_be_served_is_named(tmp_path: Path) -> None:
    config = {"model_type": "doge", "hidden_size": "many"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"can't read .*config.json: model type 'doge'.*hidden_size"):
        check_config(tmp_path)
