"""The families that transformers has, under the names and with the config.json fields of their first checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.engine.models.families.tiny import VOCAB_SIZE, TinyCheckpoint, native_checkpoint

Config = dict[str, Any]
NO_SPECIAL_TOKENS: Config = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA: Config = NO_SPECIAL_TOKENS | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GPT2: Config = NO_SPECIAL_TOKENS | {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCAB_SIZE,
    "n_ctx": 128,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
}
BIGCODE = GPT2 | {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"]}
NEOX: Config = NO_SPECIAL_TOKENS | {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "tie_word_embeddings": False,
}
OPT: Config = NO_SPECIAL_TOKENS | {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": True,
}
BLOOM: Config = NO_SPECIAL_TOKENS | {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "n_head": 4,
    "n_layer": 2,
    "seq_length": 128,
    "offset_alibi": 100,
    "pretraining_tp": 2,
    "slow_but_exact": False,
    "apply_residual_connection_post_layernorm": False,
}
FALCON: Config = NO_SPECIAL_TOKENS | {
    "model_type": "falcon",
    "architectures": ["FalconForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
}
FALCON_RW = FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
GPTJ: Config = GPT2 | {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], "rotary_dim": 8}
GPT_NEO: Config = NO_SPECIAL_TOKENS | {
    "model_type": "gpt_neo",
    "architectures": ["GPTNeoForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": None,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 128,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 6,
}
XGLM: Config = NO_SPECIAL_TOKENS | {
    "model_type": "xglm",
    "architectures": ["XGLMForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "ffn_dim": 96,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": 128,
    "scale_embedding": True,
}
MPT: Config = NO_SPECIAL_TOKENS | {
    "model_type": "mpt",
    "architectures": ["MPTForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
}
MPT_ATTENTION: Config = {
    "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
    "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
    "qk_ln": False, "softmax_scale": None,
}  # fmt: skip
GEMMA: Config = LLAMA | {
    "model_type": "gemma",
    "architectures": ["GemmaForCausalLM"],
    "head_dim": 256,
    "num_key_value_heads": 1,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
}
GEMMA2: Config = GEMMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 32,
    "num_key_value_heads": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "sliding_window": 6,
}
GEMMA3: Config = GEMMA2 | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 3,
    "sliding_window_pattern": 2,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
PHI: Config = LLAMA | {
    "model_type": "phi",
    "architectures": ["PhiForCausalLM"],
    "partial_rotary_factor": 0.4,
    "hidden_size": 320,
    "num_key_value_heads": None,
    "hidden_act": "gelu_new",
}
PHI3: Config = LLAMA | {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "original_max_position_embeddings": 128,
    "sliding_window": 7,
}
WINDOWS: Config = LLAMA | {
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Wide weights on the wide residual stream of a Gemma: its norms multiply by (1 + weight).
GEMMA_NORM_MEAN = 0.0


def without(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


def mask_buffers(layer: str) -> dict[str, torch.Tensor]:
    """Causal masks and their fill value, as in checkpoints of 2019 to 2022."""
    masks: dict[str, torch.Tensor] = {}
    for number in range(2):
        masks[f"{layer.format(number)}.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()
        masks[f"{layer.format(number)}.masked_bias"] = torch.tensor(-1e9)
    return masks


def inverse_frequencies(layer: str) -> dict[str, torch.Tensor]:
    return {f"{layer.format(number)}.rotary_emb.inv_freq": torch.ones(8) for number in range(2)}


def mpt(attention: Config | None = None, **fields: Any) -> TinyCheckpoint:
    settings = MPT_ATTENTION | (attention or {})

    def honour_bias_max(model: Any) -> None:
        # transformers reads alibi_bias_max and builds its biases for 8 regardless of the value.
        model.transformer.build_mpt_alibi_tensor = lambda num_heads, length, device=None: (
            build_mpt_alibi_tensor(num_heads, length, settings["alibi_bias_max"], device)
        )

    return native_checkpoint(MPT | fields | {"attn_config": settings}, prepare=honour_bias_max)


def first_release_falcon(model_type: str, **fields: Any) -> TinyCheckpoint:
    """Falcon before transformers supported the family."""
    current = native_checkpoint(FALCON | fields, implementation="sdpa")
    renamed = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
    dropped = ("new_decoder_architecture", "auto_map")
    config = {renamed.get(name, name): value for name, value in current.config.items() if name not in dropped}
    config |= {"model_type": model_type, "architectures": ["RWForCausalLM"]}
    return TinyCheckpoint(config, current.tensors, current.logits)


def gemma3_with_vision() -> TinyCheckpoint:
    text = native_checkpoint(GEMMA3, norm_mean=GEMMA_NORM_MEAN)
    tensors = {f"language_model.{name}": tensor for name, tensor in text.tensors.items()}
    tensors["vision_tower.vision_model.embeddings.position_embedding.weight"] = torch.ones(4, 4)
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.ones(4, 4)
    text_config = {name: value for name, value in GEMMA3.items() if name != "architectures"}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text_config,
        "vision_config": {"model_type": "siglip_vision_model"},
        "torch_dtype": "bfloat16",
    }
    assert Gemma3TextConfig.from_dict(dict(text_config)).num_hidden_layers == 3
    return TinyCheckpoint(config, tensors, text.logits)


NATIVE_CASES: dict[str, Callable[[], TinyCheckpoint]] = {
    "gpt2": lambda: native_checkpoint(
        GPT2, rename=without("transformer."), extra_tensors=mask_buffers("h.{}.attn")
    ),
    "gpt2, scores scaled by layer": lambda: native_checkpoint(
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}
    ),
    "gpt_bigcode, one kv head": lambda: native_checkpoint(BIGCODE | {"multi_query": True}),
    "gpt_bigcode, all kv heads": lambda: native_checkpoint(BIGCODE | {"multi_query": False}),
    "gptj": lambda: native_checkpoint(GPTJ, extra_tensors=mask_buffers("transformer.h.{}.attn")),
    "codegen": lambda: native_checkpoint(
        GPTJ | {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]},
        extra_tensors=mask_buffers("transformer.h.{}.attn"),
    ),
    "gpt_neo, windows in every other layer": lambda: native_checkpoint(
        GPT_NEO, extra_tensors=mask_buffers("transformer.h.{}.attn.attention")
    ),
    "xglm": lambda: native_checkpoint(XGLM),
    "gpt_neox": lambda: native_checkpoint(
        NEOX,
        extra_tensors=mask_buffers("gpt_neox.layers.{}.attention")
        | inverse_frequencies("gpt_neox.layers.{}.attention"),
    ),
    "gpt_neox, one residual after the other": lambda: native_checkpoint(
        NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0}
    ),
    "llama": lambda: native_checkpoint(
        LLAMA | {"num_key_value_heads": 4}, extra_tensors=inverse_frequencies("model.layers.{}.self_attn")
    ),
    "llama, grouped, tied": lambda: native_checkpoint(LLAMA | {"tie_word_embeddings": True}),
    "llama, biases everywhere": lambda: native_checkpoint(LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama, heads wider than the model": lambda: native_checkpoint(
        LLAMA | {"head_dim": 48, "num_attention_heads": 6, "hidden_size": 60, "num_key_value_heads": 2}
    ),
    "smollm, groups of three": lambda: native_checkpoint(
        LLAMA
        | {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        }
    ),
    "smollm3": lambda: native_checkpoint(
        LLAMA
        | {
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
        }
    ),
    "mistral, a window shorter than the prompt": lambda: native_checkpoint(
        LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6}
    ),
    "arcee": lambda: native_checkpoint(
        LLAMA | {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"}
    ),
    "cwm, windows but for one layer": lambda: native_checkpoint(
        WINDOWS | {"model_type": "cwm", "architectures": ["CwmForCausalLM"], "bos_token_id": 0}
    ),
    "ministral, windows but for one layer": lambda: native_checkpoint(
        WINDOWS | {"model_type": "ministral", "architectures": ["MinistralForCausalLM"], "head_dim": 16}
    ),
    "seed-oss, biases on queries, keys and values": lambda: native_checkpoint(
        LLAMA
        | {
            "model_type": "seed_oss",
            "architectures": ["SeedOssForCausalLM"],
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 32,
        }
    ),
    "opt": lambda: native_checkpoint(OPT),
    "opt, as its 350m": lambda: native_checkpoint(
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, rename=without("model.")
    ),
    "bloom": lambda: native_checkpoint(BLOOM, rename=without("transformer.")),
    "bloom, six heads": lambda: native_checkpoint(
        BLOOM | {"n_head": 6, "hidden_size": 96, "apply_residual_connection_post_layernorm": True}
    ),
    "falcon, as its 7b": lambda: native_checkpoint(
        FALCON | {"num_attention_heads": 71, "hidden_size": 71 * 8, "ffn_hidden_size": 96},
        implementation="sdpa",
    ),
    "falcon, as its 40b": lambda: native_checkpoint(
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, implementation="sdpa"
    ),
    "falcon, as its 11b": lambda: native_checkpoint(
        FALCON
        | {
            "new_decoder_architecture": True,
            "num_kv_heads": 1,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
        },
        implementation="sdpa",
    ),
    "falcon, as its rw-1b": lambda: native_checkpoint(FALCON_RW, implementation="sdpa"),
    "falcon, its first 7b": lambda: first_release_falcon("RefinedWebModel"),
    "falcon, its first 40b": lambda: first_release_falcon(
        "RefinedWeb", new_decoder_architecture=True, num_kv_heads=2
    ),
    "mpt": mpt,
    "mpt, as its storywriter, six heads": lambda: mpt(
        {"alibi_bias_max": 16, "clip_qkv": 1.5, "softmax_scale": 0.2}, n_heads=6, d_model=96
    ),
    "gemma": lambda: native_checkpoint(GEMMA, norm_mean=GEMMA_NORM_MEAN),
    "gemma2": lambda: native_checkpoint(GEMMA2, norm_mean=GEMMA_NORM_MEAN),
    "gemma3": lambda: native_checkpoint(GEMMA3, norm_mean=GEMMA_NORM_MEAN),
    "gemma3, beside its eyes": gemma3_with_vision,
    "phi": lambda: native_checkpoint(PHI),
    "phi, norms on queries and keys": lambda: native_checkpoint(
        PHI | {"qk_layernorm": True, "num_key_value_heads": 2}
    ),
    "phi3": lambda: native_checkpoint(PHI3),
    "phi4-mini, partly rotated": lambda: native_checkpoint(
        PHI3 | {"partial_rotary_factor": 0.75, "sliding_window": None, "tie_word_embeddings": True}
    ),
    "qwen2": lambda: native_checkpoint(
        LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    ),
    "qwen2, windows in the upper layers": lambda: native_checkpoint(
        LLAMA
        | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        }
    ),
    "qwen3": lambda: native_checkpoint(
        LLAMA
        | {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 32,
            "tie_word_embeddings": True,
        }
    ),
}


def write_llama(directory: Path, **fields: Any) -> Path:
    """A tiny LLaMA for tests of other features."""
    return native_checkpoint(LLAMA | fields).write(directory)
