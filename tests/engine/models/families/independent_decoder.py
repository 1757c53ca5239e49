"""A LLaMA-like decoder written from the papers, in double precision, without code shared with the engine.

RMS norm (arXiv 1910.07467), rotary positions (2104.09864, halves paired) or ALiBi (2108.12409), a gated MLP
(2002.05202). The families that transformers lacks differ only in names and layout, so each brings only a
function that finds a layer's matrices in its own checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.engine.models.families.tiny import Tensors


@dataclass(frozen=True)
class Projection:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weight.double().T
        return out if self.bias is None else out + self.bias.double()


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    mlp_norm: torch.Tensor
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class IndependentDecoder:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embedding: torch.Tensor  # [vocab, hidden]
    layer: Callable[[int], Layer]
    norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]
    eps: float = 1e-5
    rotary_base: float = 10000.0
    slopes: tuple[float, ...] | None = None
    """Per head; ALiBi replaces rotation."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        x = self.embedding.double()[tokens]
        for number in range(self.num_layers):
            layer = self.layer(number)
            x = x + layer.output(self._attend(self._normed(x, layer.attention_norm), layer))
            normed = self._normed(x, layer.mlp_norm)
            gate = layer.gate(normed)
            x = x + layer.down(gate * torch.sigmoid(gate) * layer.up(normed))
        return self._normed(x, self.norm)[-1] @ self.head.double().T

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * weight.double()

    def _attend(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        length = len(x)
        query = layer.query(x).view(length, self.num_heads, -1)
        key = layer.key(x).view(length, self.num_kv_heads, -1)
        value = layer.value(x).view(length, self.num_kv_heads, -1)
        if self.slopes is None:
            query, key = self._rotated(query), self._rotated(key)
        out = torch.empty_like(query)
        for head in range(self.num_heads):
            shared = head * self.num_kv_heads // self.num_heads
            scores = query[:, head] @ key[:, shared].T / math.sqrt(query.shape[-1])
            for i in range(length):
                visible = scores[i, : i + 1]
                if self.slopes is not None:
                    visible = visible - self.slopes[head] * torch.arange(i, -1, -1)
                out[i, head] = visible.softmax(0) @ value[: i + 1, shared]
        return out.view(length, -1)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Elements i and i + half are a complex number, rotated by position / base ** (2 i / head_dim)."""
        half = x.shape[-1] // 2
        speeds = self.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * speeds
        turned = (
            torch.complex(x[..., :half], x[..., half:])
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.cat([turned.real, turned.imag], dim=-1)


def projection(tensors: Tensors, name: str) -> Projection:
    return Projection(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
