"""Adapters as PEFT writes them, and the output of PEFT's merged model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@contextmanager
def _without_notices() -> Iterator[None]:
    """PEFT reads attributes that transformers has since renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Trained:
    """How an adapter is trained: its weights are random."""

    rank: int = 8
    targets: tuple[str, ...] = LLAMA_LAYERS
    seed: int = 0
    std: float = 0.3
    options: dict[str, Any] = field(default_factory=dict)


def save_adapter(model: Path, directory: Path, trained: Trained | None = None) -> Path:
    """Write an adapter of the model in the folder `model`."""
    trained = trained or Trained()
    torch.manual_seed(100 + trained.seed)
    config = LoraConfig(
        r=trained.rank,
        target_modules=list(trained.targets),
        task_type="CAUSAL_LM",
        **({"lora_alpha": trained.rank} | trained.options),
    )
    with _without_notices():
        wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=trained.std / trained.rank**0.5)
    with _without_notices():
        wrapped.save_pretrained(directory)
    return directory


def merged_model(model: Path, adapter: Path | None) -> Any:
    """Return transformers' model in fp32, with an adapter merged into its weights by PEFT."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        with _without_notices():
            base = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    return base.eval()


def merged_tokens(
    model: Path, adapter: Path | None, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return the greedy continuations by PEFT's merged model."""
    merged = merged_model(model, adapter)
    results = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids.append(int(merged(torch.tensor([ids])).logits[0, -1].argmax()))
        results.append(ids[len(prompt) :])
    return results
