"""The models of `benchmarks.gpu`, only by their shapes, and their requests.

Weights are drawn on the device and prompts are token ids, so no external data are needed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload

_FIRST_TOKEN_IDS = 10_000
_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    is_tied: bool
    max_position: int = 8192

    @property
    def attention(self) -> Shape:
        return Shape(self.name, self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def layer_weights(self) -> int:
        """Number of weights in one layer's matmuls."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * heads + 2 * kv_heads + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    def save_config(self, directory: Path) -> str:
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": _MODEL_TYPES[self.architecture],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
        }
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)


LLAMA_8B = ModelShape(
    name="llama-3.1-8b", architecture="LlamaForCausalLM", hidden_size=4096, intermediate_size=14336,
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128_256, rope_theta=500_000.0,
    is_tied=False,
)  # fmt: skip
QWEN_600M = ModelShape(
    name="qwen3-0.6b", architecture="Qwen3ForCausalLM", hidden_size=1024, intermediate_size=3072,
    num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, vocab_size=151_936, rope_theta=1_000_000.0,
    is_tied=True,
)  # fmt: skip
TINY = ModelShape(
    name="tiny", architecture="Qwen3ForCausalLM", hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=512, rope_theta=10_000.0, is_tied=True,
    max_position=512,
)  # fmt: skip


def uniform_requests(model: ModelShape, count: int, shortest: int, longest: int, *, seed: int) -> Workload:
    """Prompts and outputs with uniform lengths; 256, 100 and 1,024 are the values of nano-vllm's benchmark."""
    draw = random.Random(seed)
    prompts = [random_tokens(draw, model, draw.randint(shortest, longest)) for _ in range(count)]
    return Workload("uniform", prompts, [draw.randint(shortest, longest) for _ in prompts])


def random_tokens(draw: random.Random, model: ModelShape, count: int) -> list[int]:
    most = min(_FIRST_TOKEN_IDS, model.vocab_size - 1)
    return [draw.randint(0, most) for _ in range(count)]
