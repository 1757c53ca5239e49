"""Phi 1 to 4: transformers' modules, except for rotary scaling names of Phi 3's first release."""

from __future__ import annotations

from transformers import PretrainedConfig

from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.share import INPUTS, MERGED_MLP, MERGED_QKV, TensorSplit
from pagemill.engine.models.families.family import Family, RawConfig, native_config
from pagemill.engine.models.families.llama_like import like_llama

_FIRST_RELEASE_ROPE_TYPES = ("su", "yarn")  # both are called longrope today


def _build_phi3_config(raw: RawConfig) -> PretrainedConfig:
    rope = raw.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("type") in _FIRST_RELEASE_ROPE_TYPES:
        raw = {**raw, "rope_scaling": rope | {"type": "longrope"}}
    return native_config(raw)


_PHI3 = DecoderTraits(window="one")
# In transformers' plan every rank gathers the merged projections, since a plain cut would assign the queries to one
# rank and the keys to the next.
_PHI3_SPLIT = TensorSplit(
    layers={
        "layers.*.self_attn.qkv_proj": MERGED_QKV,
        "layers.*.self_attn.o_proj": INPUTS,
        "layers.*.mlp.gate_up_proj": MERGED_MLP,
        "layers.*.mlp.down_proj": INPUTS,
    },
    kv_head_counts=("num_key_value_heads",),
    counts_in_config=True,
)

FAMILIES = (
    Family(name="Phi 1, 1.5, 2", model_types=("phi",), architectures=("PhiForCausalLM",)),
    like_llama(
        "Phi 3, 3.5, 4",
        "phi3",
        "Phi3ForCausalLM",
        decoder=_PHI3,
        build_config=_build_phi3_config,
        split=_PHI3_SPLIT,
    ),
)
