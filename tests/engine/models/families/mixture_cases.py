"""The families with experts: a tensor for each expert, as publishers wrote them, or all of a layer's in one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.engine.models.families.native_cases import LLAMA, Config
from tests.engine.models.families.tiny import Tensors, TinyCheckpoint, native_checkpoint

_NEW_NAMES = ("gate_proj", "up_proj", "down_proj")
_OLD_NAMES = ("w1", "w3", "w2")
_OLMOE: Config = LLAMA | {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
_MIXTRAL: Config = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_PHI: Config = _MIXTRAL | {
    "model_type": "phimoe",
    "architectures": ["PhiMoEForCausalLM", "PhimoeForCausalLM"],
    "attention_bias": True,
    "lm_head_bias": True,
    "router_jitter_noise": 0.4,
    "rope_scaling": None,
}
_GRANITE: Config = LLAMA | {
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_QWEN2: Config = LLAMA | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_QWEN3: Config = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
_GLM: Config = LLAMA | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_GPT_OSS: Config = LLAMA | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_bias": True,
    "swiglu_limit": 0.7,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}


def _split(tensors: Tensors, names: tuple[str, str, str]) -> Tensors:
    """Give every expert separate tensors."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        block, is_experts, part = name.partition(".experts.")
        if not is_experts:
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = weight.chunk(2) if part == "gate_up_proj" else [weight]
            chosen = names[:2] if part == "gate_up_proj" else names[2:]
            for published, one in zip(chosen, parts, strict=True):
                out[f"{block}.experts.{expert}.{published}.weight"] = one.clone()
    return out


def _mixtral_names(tensors: Tensors) -> Tensors:
    split = _split(tensors, _OLD_NAMES)
    return {re.sub(r"\.mlp\.", ".block_sparse_moe.", name): tensor for name, tensor in split.items()}


def _phi_names(tensors: Tensors) -> Tensors:
    return {name.replace(".router.", ".gate."): tensor for name, tensor in _mixtral_names(tensors).items()}


def _granite_names(tensors: Tensors) -> Tensors:
    old = {
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
        "moe.router.": "moe.router.layer.",
    }
    out: Tensors = {}
    for name, tensor in tensors.items():
        for new, published in old.items():
            name = name.replace(new, published)
        out[name] = tensor
    return out


def _correct_choices(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)


def _raise_sinks(model: Any) -> None:
    """As large as the scores of several keys: a softmax without them would choose other tokens."""
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(mean=1.0, std=2.0)


def _gpt_oss() -> TinyCheckpoint:
    return native_checkpoint(_GPT_OSS, prepare=_raise_sinks)


def _gpt_oss_mxfp4() -> TinyCheckpoint:
    """Experts as OpenAI published them; the reference computes with transformers' version of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored: Tensors = {}

    def quantize(model: Any) -> None:
        _raise_sinks(model)
        for index, layer in enumerate(model.model.layers):
            for name in ("gate_up_proj", "down_proj"):
                parameter = getattr(layer.mlp.experts, name).data
                count, in_features, out_features = parameter.shape
                groups = (count, out_features, in_features // 32)
                blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
                scales = torch.randint(122, 126, groups, dtype=torch.uint8)
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                stem = f"model.layers.{index}.mlp.experts.{name}"
                stored.update({f"{stem}_blocks": blocks, f"{stem}_scales": scales})

    checkpoint = native_checkpoint(_GPT_OSS, prepare=quantize)
    widened = {name.rpartition("_")[0] for name in stored}
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in widened}
    config = checkpoint.config | {"quantization_config": {"quant_method": "mxfp4"}}
    return replace(checkpoint, config=config, tensors=tensors | stored)


_new_names = partial(_split, names=_NEW_NAMES)


def _mixture(config: Config, published: Callable[[Tensors], Tensors] = _new_names) -> TinyCheckpoint:
    checkpoint = native_checkpoint(config, prepare=_correct_choices)
    tensors = {name: tensor.detach() for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=published(tensors))


def phi_moe(**fields: Any) -> TinyCheckpoint:
    return _mixture(_PHI | fields, _phi_names)


MIXTURE_CASES: dict[str, Callable[[], TinyCheckpoint]] = {
    "mixtral": lambda: _mixture(_MIXTRAL, _mixtral_names),
    "mixtral, a window shorter than the prompt": lambda: _mixture(_MIXTRAL | {"sliding_window": 7}, _mixtral_names),
    "olmoe": lambda: _mixture(_OLMOE),
    "olmoe, values clipped": lambda: _mixture(_OLMOE | {"clip_qkv": 0.5, "norm_topk_prob": True}),
    "phimoe": phi_moe,
    "granitemoe": lambda: _mixture(_GRANITE, _granite_names),
    "qwen2_moe, an expert for all": lambda: _mixture(_QWEN2),
    "qwen3_moe, a dense layer between": lambda: _mixture(_QWEN3),
    "qwen3_moe, experts in one tensor": lambda: _mixture(_QWEN3 | {"norm_topk_prob": False}, dict),
    "glm4_moe": lambda: _mixture(_GLM),
    "glm4_moe, no norms on queries, one group": lambda: _mixture(
        _GLM | {"use_qk_norm": False, "n_group": 1, "topk_group": 1}
    ),
    "gpt_oss": _gpt_oss,
    "gpt_oss, mxfp4": _gpt_oss_mxfp4,
}  # fmt: skip
