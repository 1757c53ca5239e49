"""LLaMA and similar families: shared conversions, and families that only need an entry here.

To add a family, add an entry to `FAMILIES`, with separate traits if it differs from LLaMA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from pagemill.engine.layers.decoder_traits import LLAMA_DECODER, DecoderTraits
from pagemill.engine.models.families.family import Family, RawConfig, Tensors, require

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
)


def shared_fields(raw: RawConfig, **overrides: Any) -> dict[str, Any]:
    """Return the fields with a common meaning, updated with `overrides`.

    Raises:
        ModelLoadError: a field is missing whose default would be the size of another model.
    """
    fields = {name: raw[name] for name in (*_REQUIRED, *_OPTIONAL) if raw.get(name) is not None} | overrides
    missing = [name for name in _REQUIRED if name not in fields]
    require(not missing, f"config.json of model type {raw.get('model_type')!r} lacks {', '.join(missing)}")
    # transformers ties embeddings by default; these families do not.
    fields.setdefault("tie_word_embeddings", False)
    return fields


def renamed(tensors: Tensors, fragments: Mapping[str, str]) -> Tensors:
    """Rename every tensor: each fragment of a name is replaced, in the order given."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in fragments.items():
            name = name.replace(old, new)
        out[name] = tensor
    return out


def split_rows(tensors: Tensors, packed: str, parts: tuple[str, ...]) -> Tensors:
    """Cut tensors whose name contains `packed` into equal parts along their rows (weights and biases alike)."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if packed in name:
            for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
                out[name.replace(packed, part)] = rows
        else:
            out[name] = tensor
    return out


def llama_config(raw: RawConfig) -> PretrainedConfig:
    """Build the configuration of a LLaMA under another name."""
    config: PretrainedConfig = LlamaConfig.from_dict(shared_fields(raw))
    return config


def like_llama(
    name: str, model_type: str, *architectures: str, decoder: DecoderTraits = LLAMA_DECODER, **mapping: Any
) -> Family:
    """Define a family in LLaMA's layout; `mapping`: further fields of `Family`."""
    return Family(
        name=name, model_types=(model_type,), architectures=architectures, decoder=decoder, **mapping
    )


FAMILIES = (
    like_llama("Aquila, Aquila2", "aquila", "AquilaForCausalLM", "AquilaModel", build_config=llama_config),
    like_llama("Arcee (AFM)", "arcee", "ArceeForCausalLM"),
    like_llama("CWM", "cwm", "CwmForCausalLM"),
    like_llama("LLaMA, LLaMA 2, Llama 3, SmolLM, SmolLM2", "llama", "LlamaForCausalLM", "LLaMAForCausalLM"),
    like_llama("Ministral", "ministral", "MinistralForCausalLM"),
    like_llama("Mistral", "mistral", "MistralForCausalLM", decoder=DecoderTraits(window="one")),
    like_llama("Qwen2, Qwen2.5", "qwen2", "Qwen2ForCausalLM"),
    like_llama("Qwen3", "qwen3", "Qwen3ForCausalLM"),
    like_llama("Seed-OSS", "seed_oss", "SeedOssForCausalLM"),
    like_llama("SmolLM3", "smollm3", "SmolLM3ForCausalLM"),
)
