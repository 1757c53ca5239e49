"""A tiny random fp32 model on disk, and transformers' own object for it, to compare complete searches with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
)

VOCAB_SIZE = 61
EOS = (3, 7)


def save_tiny_llama(
    directory: Path,
    *,
    max_position_embeddings: int = 256,
    std: float = 0.6,
    hidden_size: int = 32,
    intermediate_size: int = 64,  # complete panels: layers are compiled where possible
    vocab_size: int = VOCAB_SIZE,
    eos: Sequence[int] = EOS,
) -> Any:
    """Two layers, grouped heads. Wide weights, so that candidates are rarely close."""
    return _save(
        directory,
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=max_position_embeddings,
                eos_token_id=list(eos),
            )
        ),
        std,
        eos,
    )


def save_tiny_ministral(
    directory: Path, layer_types: list[str], *, std: float, vocab_size: int, eos: Sequence[int]
) -> Any:
    """Layers with windows of 6 tokens, or without, as `layer_types` specifies."""
    config = MinistralConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=len(layer_types),
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        sliding_window=6, layer_types=layer_types, eos_token_id=list(eos),
    )  # fmt: skip
    return _save(directory, MinistralForCausalLM(config), std, eos)


def save_tiny_gpt2(directory: Path, *, std: float = 0.6) -> Any:
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=128, n_embd=32, n_layer=2, n_head=4, eos_token_id=list(EOS)
    )
    return _save(directory, GPT2LMHeadModel(config), std)


def _save(directory: Path, model: Any, std: float, eos: Sequence[int] = EOS) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or "ln_" in name
            if not is_norm:
                parameter.normal_(std=std if parameter.ndim > 1 else 0.1)
    model.generation_config.eos_token_id = list(eos)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return model.eval()
