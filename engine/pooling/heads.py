"""Heads that convert the hidden states of a batch's tokens to one result row per text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.packed_attention import PackedTexts
from pagemill.engine.models.checkpoint import read_tensors
from pagemill.engine.models.formats.pickled import converted_pickles
from pagemill.engine.pooling.families import PoolingFamily
from pagemill.engine.pooling.folder import (
    Activation,
    ClassifierFolder,
    DenseLayer,
    EmbedderFolder,
    LayerNormLayer,
    PoolingMode,
    VectorModule,
)

ACTIVATIONS: Final[dict[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


class VectorHead(nn.Module):
    """Pools each text's tokens, then applies the modules that the directory lists.

    The pooling is defined as in Sentence Transformers, so the vectors are the same.
    """

    def __init__(self, folder: EmbedderFolder, hidden_size: int) -> None:
        """Read the modules' weights. Raises `ModelLoadError`."""
        super().__init__()
        self._pooling = folder.pooling
        width = hidden_size * len(folder.pooling.modes)
        steps: list[nn.Module] = []
        for module in folder.modules:
            step, width = _vector_module(module, width)
            steps.append(step)
        self.steps = nn.ModuleList(steps)
        self.width = width

    def forward(self, hidden: torch.Tensor, texts: PackedTexts, num_skipped: int) -> torch.Tensor:
        """Map hidden states [num_tokens, hidden_size] to vectors [num_texts, width] in fp32."""
        skipped = 0 if self._pooling.include_prompt else num_skipped
        rows = [
            torch.cat([_pooled(group, mode, skipped) for mode in self._pooling.modes], dim=-1)
            for group in groups_of(hidden, texts)
        ]
        x = torch.cat(rows)
        for step in self.steps:
            x = step(x)
        return x.float()


class LabelHead(nn.Module):
    """A sequence classifier's head: logits [num_texts, num_labels] in fp32."""

    def __init__(self, folder: ClassifierFolder, family: PoolingFamily, module: Any) -> None:
        super().__init__()
        self._family = family
        self._classifier = [module]  # in a list: its base model is not part of the head
        self._takes_mean = getattr(module.config, "classifier_pooling", "cls") == "mean"
        self.width = len(folder.labels)

    def forward(self, hidden: torch.Tensor, texts: PackedTexts, last_tokens: torch.Tensor) -> torch.Tensor:
        """`last_tokens` [num_texts]: the index of each text's last token that is not padding."""
        if self._family.is_causal:
            chosen = hidden[last_tokens]
        elif self._takes_mean:
            chosen = torch.cat([_pooled(group, "mean", 0) for group in groups_of(hidden, texts)])
        else:
            chosen = torch.cat([group[:, 0] for group in groups_of(hidden, texts)])
        return self._family.label_head(self._classifier[0], chosen).float()


def groups_of(hidden: torch.Tensor, texts: PackedTexts) -> Iterator[torch.Tensor]:
    """Yield the states of texts of equal length, [num_texts, length, hidden_size]."""
    begin = 0
    for count, length in texts.groups:
        end = begin + count * length
        yield hidden[begin:end].view(count, length, -1)
        begin = end


def _pooled(x: torch.Tensor, mode: PoolingMode, skipped: int) -> torch.Tensor:
    """Pool [num_texts, length, hidden_size] to [num_texts, hidden_size], without the first `skipped` tokens."""
    length = x.shape[1]
    kept = x[:, min(skipped, length) :]
    match mode:
        case "cls":
            return x[:, skipped if skipped < length else 0]
        case "lasttoken":
            return x[:, -1]
        case "max":
            return kept.amax(dim=1) if kept.shape[1] else x.new_full((len(x), x.shape[2]), float("-inf"))
        case "mean" | "mean_sqrt_len_tokens":
            number = torch.tensor(max(kept.shape[1], 1e-9))
            total = kept.sum(dim=1, dtype=torch.float32)
            return (total / (number if mode == "mean" else number.sqrt())).to(x.dtype)
        case "weightedmean":
            weights = torch.arange(
                length - kept.shape[1] + 1, length + 1, dtype=torch.float32, device=x.device
            )
            total = (kept.float() * weights[:, None]).sum(dim=1)
            return (total / weights.sum().clamp(min=1e-9)).to(x.dtype)


class _Dense(nn.Module):
    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        self.linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.has_bias, device="meta")
        _fill(self.linear, layer.directory, "linear.")
        self._activate = ACTIVATIONS[layer.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(self.linear(x))


class _LayerNorm(nn.Module):
    def __init__(self, layer: LayerNormLayer) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(layer.dimension, device="meta")
        _fill(self.norm, layer.directory, "norm.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return normed


class Normalize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


def _vector_module(module: VectorModule, width: int) -> tuple[nn.Module, int]:
    """Return the module and the width of its vectors. Raises `ModelLoadError`."""
    if module == "normalize":
        return Normalize(), width
    takes, gives = (
        (module.in_features, module.out_features)
        if isinstance(module, DenseLayer)
        else (module.dimension, module.dimension)
    )
    if takes != width:
        raise ModelLoadError(f"{module.directory}: it takes {takes} numbers, and is given {width}")
    return (_Dense(module) if isinstance(module, DenseLayer) else _LayerNorm(module)), gives


def _fill(module: nn.Module, directory: Path, prefix: str) -> None:
    """Load a small module's tensors; they become fp32. Raises `ModelLoadError`."""
    file = directory / "model.safetensors"
    files = [file]
    if not file.is_file():
        file = directory / "pytorch_model.bin"
        if not file.is_file():
            raise ModelLoadError(f"{directory} has neither model.safetensors nor pytorch_model.bin")
        files = converted_pickles([file])
    tensors = {name.removeprefix(prefix): tensor.float() for name, tensor in read_tensors(files).items()}
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ModelLoadError(f"can't load the weights in {file}: {error}") from error
    module.requires_grad_(False)
