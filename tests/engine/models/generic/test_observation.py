"""Attention as startup observes it, beyond the tokens that a comparison reaches."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_chunked_causal_mask
from transformers.models.olmo2 import modeling_olmo2

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.attention import refuse_unknown
from pagemill.engine.llm import LLM
from tests.engine.models.generic.tiny_configs import tiny_config


def start(directory: Path, **fields: Any) -> LLM:
    """Startup with random weights and without a comparison."""
    config = tiny_config("olmo2", 0) | {"model_type": "olmo2"} | fields
    (directory / "config.json").write_text(json.dumps(config))
    return LLM(str(directory), load_format="dummy", verify=False, num_threads=1, num_kv_blocks=8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"s_aux": torch.ones(4)}, "the attention takes s_aux"),
        ({"position_bias": torch.ones(1)}, "the attention takes position_bias"),
        ({"is_causal": False}, "the attention is bidirectional"),
    ],
    ids=["sink", "bias", "both ways"],
)
def test_an_argument_that_is_not_computed_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        refuse_unknown(None, arguments)


def test_arguments_without_effect_pass() -> None:
    refuse_unknown(
        None, {"is_causal": True, "output_attentions": False, "position_ids": torch.ones(1), "s_aux": None}
    )


def test_a_mask_of_the_models_own_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="mask"):
        refuse_unknown(torch.ones(1), {})


@pytest.mark.slow
def test_chunks_longer_than_any_comparison_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks_of_8192(config: Any, **request: Any) -> Any:
        chunked = copy.copy(config)
        chunked.attention_chunk_size = 8192
        return create_chunked_causal_mask(config=chunked, **request)

    start(tmp_path)
    monkeypatch.setattr(modeling_olmo2, "create_causal_mask", chunks_of_8192)
    start(tmp_path, attention_chunk_size=8192)
    for fields in ({}, {"attention_chunk_size": 4096}, {"sliding_window": 8192}):
        with pytest.raises(
            ModelLoadError, match="'olmo2' is not supported: the attention mask is neither causal nor"
        ):
            start(tmp_path, **fields)


def test_chunks_have_blocks_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_olmo2, "create_causal_mask", create_chunked_causal_mask)
    assert start(tmp_path, attention_chunk_size=24).engine.stats().kv.groups == ((-24, 0),)


def test_attention_in_both_directions_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'olmo2' is not supported: the attention is bidirectional"):
        start(tmp_path, is_causal=False)


def test_heads_that_do_not_share_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'olmo2' is not supported|can't (read|load)"):
        start(tmp_path, num_key_value_heads=3)


def test_an_encoder_is_refused_by_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    with pytest.raises(ModelLoadError, match="'BertForMaskedLM' of model type 'bert' is not supported"):
        LLM(str(tmp_path))


def test_a_decoder_of_the_bert_kind_that_is_none_is_refused(tmp_path: Path) -> None:
    config = tiny_config("bert", 0) | {"model_type": "bert", "is_decoder": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="'bert' is not supported: the attention is bidirectional"):
        LLM(str(tmp_path), load_format="dummy", num_threads=1, num_kv_blocks=8)
