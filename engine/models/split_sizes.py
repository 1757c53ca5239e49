"""The numbers of ranks over which a model can be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.share import TensorSplit

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """The sizes of a model that must be divisible."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_blocks: int | None = None
    """See `TensorSplit.blocks`."""
    input_group: int = 1
    """Number of inputs that are quantized together: a rank has complete groups."""

    @classmethod
    def from_config(
        cls, model_config: Any, split: TensorSplit, num_kv_heads: int, input_group: int = 1
    ) -> SplitSizes:
        num_heads = int(model_config.num_attention_heads)
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=getattr(model_config, "head_dim", None) or model_config.hidden_size // num_heads,
            intermediate_size=split.intermediate_size(model_config),
            vocab_size=int(model_config.vocab_size),
            num_blocks=None if split.blocks is None else split.blocks(model_config),
            input_group=input_group,
        )

    def check(self, size: int) -> None:
        """Raise `ConfigError`, with the possible sizes, if `size` ranks cannot share the model."""
        if (obstacle := self.obstacle(size)) is None:
            return
        working = [str(other) for other in range(2, _MOST_RANKS + 1) if self.obstacle(other) is None]
        use = f"use one of 1, {', '.join(working)}" if working else "use 1"
        raise ConfigError(f"tensor_parallel_size={size} {obstacle}; {use}", setting="tensor_parallel_size")

    def obstacle(self, size: int) -> str | None:
        """Return the reasons why `size` ranks cannot share the model."""
        for name, count in (
            ("num_attention_heads", self.num_heads),
            ("intermediate_size", self.intermediate_size),
        ):
            if count % size:
                return f"does not divide the model's {name} of {count}"
        if self.num_kv_heads % size and size % self.num_kv_heads:
            return f"neither divides the model's {self.num_kv_heads} KV heads nor is a multiple of them"
        if self.num_blocks is not None and self.num_blocks % size:
            return f"does not divide the {self.num_blocks} blocks that the model's heads are stored in"
        if self.vocab_size < size:
            return f"is more than the model's vocab_size of {self.vocab_size}"
        for inputs in (self.num_heads * self.head_dim, self.intermediate_size):
            if inputs // size % self.input_group:
                return (
                    f"leaves a rank {inputs // size} of {inputs} inputs, and quantization='int8' scales "
                    f"{self.input_group} together"
                )
        return None
