"""Log probabilities of chosen and most likely tokens, on the device until copied to the host.

`tensors` are copied to the host; `entries` reads the copies from an iterator, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pagemill.engine.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """One position per row."""

    token_ids: torch.Tensor  # [num_rows] int64
    chosen: torch.Tensor  # [num_rows] float32, the log probability of token_ids
    values: torch.Tensor  # [num_rows, max_count] float32, best first
    ids: torch.Tensor  # [num_rows, max_count] int64
    counts: tuple[int, ...]
    """The number of most likely tokens requested per row."""

    @classmethod
    def from_logprobs(
        cls, logprobs: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]
    ) -> TopLogprobs:
        """Select from log probabilities [num_rows, vocab_size]. Impossible tokens get the lowest finite number."""
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        values, ids = logprobs.topk(min(max(counts, default=0), logprobs.shape[1]))
        lowest = torch.finfo(torch.float32).min  # JSON does not support infinity
        return cls(token_ids, chosen.clamp(min=lowest), values.clamp(min=lowest), ids, tuple(counts))

    def tensors(self) -> list[torch.Tensor]:
        return [self.token_ids, self.chosen, self.values, self.ids]

    def entries(self, copies: Iterator[torch.Tensor]) -> list[TokenLogprobs]:
        """Return one entry per row."""
        tokens, chosen, values, ids = (next(copies).tolist() for _ in range(4))
        return [
            TokenLogprobs(
                tokens[row], chosen[row], list(zip(ids[row][:count], values[row][:count], strict=True))
            )
            for row, count in enumerate(self.counts)
        ]


@dataclass(frozen=True, slots=True)
class ReadLogprobs:
    """Log probabilities of chosen tokens after some of a step's tokens, still on the device."""

    reads: list[tuple[int, int]]
    """(index in the plan's work, number of chosen tokens), in order."""
    slices: list[torch.Tensor]  # [num_values] float32 each, concatenated over the reads

    def tensors(self) -> list[torch.Tensor]:
        return self.slices

    def entries(self, copies: Iterator[torch.Tensor]) -> dict[int, list[list[float]]]:
        """Return one list per read, by the index of its work."""
        values = iter([value for _ in self.slices for value in next(copies).tolist()])
        found: dict[int, list[list[float]]] = {}
        for index, length in self.reads:
            found.setdefault(index, []).append([next(values) for _ in range(length)])
        return found


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of one row's chunk of its prompt, still on the device."""

    work_index: int
    slices: list[TopLogprobs]

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for one in self.slices for tensor in one.tensors()]

    def entries(self, copies: Iterator[torch.Tensor]) -> list[TokenLogprobs]:
        return [entry for one in self.slices for entry in one.entries(copies)]
