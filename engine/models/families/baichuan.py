"""Baichuan and Baichuan2: a LLaMA with q, k and v in one tensor.

The 7B models use rotation, the 13B models ALiBi. Baichuan2's head multiplies with rows of length one
(NormHead). config.json does not specify either directly: see `_is_rotary` and `_has_norm_head`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from pagemill.engine.layers.positions.alibi import replace_rotation_by_alibi
from pagemill.engine.models.families.family import RawConfig, Tensors, require
from pagemill.engine.models.families.llama_like import like_llama, shared_fields, split_rows

_ROTARY_ARCHITECTURE = "BaiChuanForCausalLM"  # Baichuan-7B's spelling
_BAICHUAN2_VOCAB_SIZE = 125696
_TRAINED_CONTEXT = 4096
_QKV = ("q_proj", "k_proj", "v_proj")


def _is_rotary(raw: RawConfig) -> bool:
    """Return True for a rotary model: only its code reads `max_position_embeddings`."""
    return _ROTARY_ARCHITECTURE in (raw.get("architectures") or ()) or "max_position_embeddings" in raw


def _has_norm_head(raw: RawConfig) -> bool:
    """Return True for Baichuan2: only it was trained with a loss on the head's scale or has this vocabulary."""
    return "z_loss_weight" in raw or raw.get("vocab_size") == _BAICHUAN2_VOCAB_SIZE


def _build_config(raw: RawConfig) -> PretrainedConfig:
    require(
        raw.get("num_key_value_heads") in (None, raw.get("num_attention_heads")),
        "Baichuan with fewer KV heads than heads is not supported",
    )
    context = raw.get("max_position_embeddings") or raw.get("model_max_length") or _TRAINED_CONTEXT
    config: PretrainedConfig = LlamaConfig.from_dict(
        shared_fields(raw, max_position_embeddings=context)
        | {"uses_alibi": not _is_rotary(raw), "has_norm_head": _has_norm_head(raw)}
    )
    return config


def _convert_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    tensors = split_rows(tensors, "W_pack", _QKV)
    head = tensors.get("lm_head.weight")
    if config.has_norm_head and head is not None:
        tensors["lm_head.weight"] = nn.functional.normalize(head.float()).to(head.dtype)
    return tensors


def _adapt(module: nn.Module) -> None:
    config = module.config
    assert isinstance(config, PretrainedConfig)
    if config.uses_alibi:
        with torch.no_grad():
            replace_rotation_by_alibi(module)


BAICHUAN = like_llama(
    "Baichuan, Baichuan2",
    "baichuan",
    "BaiChuanForCausalLM",
    "BaichuanForCausalLM",
    build_config=_build_config,
    convert_tensors=_convert_tensors,
    adapt=_adapt,
    extrapolates=lambda config: bool(config.uses_alibi),
)
