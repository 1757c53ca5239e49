"""Mixtures of experts whose attention uses transformers' interface.

A family declares the computation of its routers; the experts are replaced in any model
(`pagemill.engine.layers.experts`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.decoder_traits import LLAMA_DECODER, DecoderTraits
from pagemill.engine.layers.experts.experts import ClampedSwiglu, declare_routing, experts_modules
from pagemill.engine.layers.experts.router import SparseMixer
from pagemill.engine.layers.share import CHANNELS, INPUTS, KV_HEADS, TensorSplit
from pagemill.engine.models.families.family import Family
from pagemill.kernels.experts import Routing


class _Column(nn.Module):
    """A linear layer that returns its single output with a stride.

    torch computes the sigmoid of adjacent values as vectors, and the remaining ones with another function. With a
    stride, every row uses the latter, regardless of its neighbors.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat(1, 2)[:, :1]  # type: ignore[no-any-return]


def _adapt_qwen2(module: nn.Module) -> None:
    declare_routing(module, _softmax)
    for block in module.modules():
        if hasattr(block, "shared_expert_gate"):
            block.shared_expert_gate = _Column(block.shared_expert_gate)  # type: ignore[arg-type]


def _adapt_gpt_oss(module: nn.Module) -> None:
    declare_routing(module, _normalised)
    for experts in experts_modules(module).values():
        experts.declared = ClampedSwiglu(float(experts.alpha), float(experts.limit))


def _adapt_phi(module: nn.Module) -> None:
    declare_routing(module, _sparse_mixer)
    for part in module.modules():
        if hasattr(part, "rope_init_fn"):
            vars(part)["forward"] = MethodType(_rotate_by_buffers, part)


def _rotate_by_buffers(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """Return the cosines and sines of a rotary embedding that would compute frequencies on the host each time."""
    angles = position_ids[..., None].float() * self.inv_freq
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos() * self.attention_scaling, both.sin() * self.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


def _normalised(router: Any) -> Routing:
    return Routing(top_k=router.top_k, normalizes=True)


def _softmax(router: Any) -> Routing:
    return Routing(top_k=router.top_k, normalizes=bool(router.norm_topk_prob))


def _sparse_mixer(router: Any) -> SparseMixer:
    return SparseMixer(float(router.router_jitter_noise))


def sigmoid_routing(router: Any) -> Routing:
    """Routing of DeepSeek V3 and GLM-4.5: a group's score is that of its two best experts, corrected for selection."""
    return Routing(
        top_k=router.top_k,
        scores="sigmoid",
        normalizes=bool(router.norm_topk_prob),
        epsilon=1e-20,
        scale=float(router.routed_scaling_factor),
        num_groups=int(router.num_group),
        kept_groups=int(router.topk_group),
        group_best=2,
    )


def _mixture(
    name: str,
    model_type: str,
    architecture: str,
    routing: Callable[[Any], Routing],
    decoder: DecoderTraits | None = None,
) -> Family:
    return Family(
        name=name,
        model_types=(model_type,),
        architectures=(architecture,),
        decoder=decoder,
        adapt=partial(declare_routing, routing_of=routing),
    )


_GPT_OSS_SPLIT = TensorSplit(
    layers={
        "layers.*.self_attn.q_proj": CHANNELS,
        "layers.*.self_attn.k_proj": KV_HEADS,
        "layers.*.self_attn.v_proj": KV_HEADS,
        "layers.*.self_attn.o_proj": INPUTS,
    }
)

FAMILIES = (
    _mixture("GLM-4.5, 4.6, 4.7", "glm4_moe", "Glm4MoeForCausalLM", sigmoid_routing, LLAMA_DECODER),
    Family(
        name="gpt-oss",
        model_types=("gpt_oss",),
        architectures=("GptOssForCausalLM",),
        decoder=DecoderTraits(has_half_angles=True),
        adapt=_adapt_gpt_oss,
        split=_GPT_OSS_SPLIT,
    ),
    _mixture("Granite 3 MoE", "granitemoe", "GraniteMoeForCausalLM", _normalised),
    _mixture("Mixtral", "mixtral", "MixtralForCausalLM", _normalised, DecoderTraits(window="one")),
    _mixture("OLMoE", "olmoe", "OlmoeForCausalLM", _softmax),
    Family(
        name="Phi 3.5 MoE",
        model_types=("phimoe",),
        architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
        adapt=_adapt_phi,
    ),
    Family(
        name="Qwen1.5 MoE, Qwen2 MoE",
        model_types=("qwen2_moe",),
        architectures=("Qwen2MoeForCausalLM",),
        decoder=LLAMA_DECODER,
        adapt=_adapt_qwen2,
    ),
    _mixture("Qwen3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM", _softmax, LLAMA_DECODER),
)
