"""Tiny random checkpoints on disk, named and laid out like the family's first publication, each with a reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB_SIZE = 97
NUM_OUTPUT_TOKENS = 8
# Lengths around the block size and the token budget; no two prompts share more than their first token.
PROMPTS = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 2, 5, 9, 16, 17, 24)]
# Rounding could change a reference whose margin is smaller than this.
SMALLEST_MARGIN = 2e-4

Tensors = dict[str, torch.Tensor]
Logits = Callable[[list[int]], torch.Tensor]
"""The next token's logits [vocab_size] after all the given tokens, computed from scratch."""


@dataclass(frozen=True)
class TinyCheckpoint:
    config: dict[str, Any]
    """config.json as the publisher wrote it."""
    tensors: Tensors
    """Under the publisher's names."""
    logits: Logits
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options that the case needs."""

    def write(self, directory: Path, *, num_shards: int = 1) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        write_tensors(directory, self.tensors, num_shards=num_shards)
        return directory

    def complete(self, prompt: list[int]) -> list[int]:
        """The reference's greedy output, recomputed completely for every token."""
        tokens = list(prompt)
        for _ in range(NUM_OUTPUT_TOKENS):
            top = self.logits(tokens).topk(2)
            assert float(top.values[0] - top.values[1]) > SMALLEST_MARGIN, "a tie: choose another seed"
            tokens.append(int(top.indices[0]))
        return tokens[len(prompt) :]


def write_tensors(directory: Path, tensors: Tensors, *, num_shards: int = 1) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        # Distributed in turn: neighbors in a layer are in different files.
        dealt = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_shards == shard}
        save_file(dealt, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(dealt, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def randomise(module: torch.nn.Module, *, norm_mean: float = 1.0) -> None:
    """Wide weights: those of a new model would leave the best tokens almost tied."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(mean=norm_mean if is_norm else 0.0, std=0.2)


def reference_logits(model: Any) -> Logits:
    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        out: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        return out

    return logits


def native_checkpoint(
    config: dict[str, Any],
    *,
    rename: Callable[[str], str] = lambda name: name,
    extra_tensors: Tensors | None = None,
    norm_mean: float = 1.0,
    implementation: str = "eager",
    prepare: Callable[[Any], None] = lambda _model: None,
    options: dict[str, Any] | None = None,
) -> TinyCheckpoint:
    """A family that transformers has: the reference is its module with its own attention implementation."""
    model_config: Any = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    model = model_class._from_config(
        model_config, dtype=torch.float32, attn_implementation=implementation
    ).eval()
    randomise(model, norm_mean=norm_mean)
    prepare(model)
    tied = set(model.all_tied_weights_keys)
    tensors = {rename(name): tensor for name, tensor in model.state_dict().items() if name not in tied}
    return TinyCheckpoint(config, tensors | (extra_tensors or {}), reference_logits(model), options or {})
