"""A step's changes of its logits, on the device: each kind for all samples together.

The number of kernels does not grow with the samples, and all arrays arrive in the step's single copy. A row's values
are the same as if it ran alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ANY_TOKEN = -1
_NO_TOKEN = -2
_ROWS_AT_ONCE = 256
"""Number of rows of the [rows, vocabulary] tables in which penalties count tokens."""


@dataclass(frozen=True, slots=True)
class Biases:
    """Values that are added, one per (sample, token)."""

    samples: torch.Tensor  # [num_pairs] int64
    token_ids: torch.Tensor  # [num_pairs] int64
    values: torch.Tensor  # [num_pairs] float32

    def apply(self, logits: torch.Tensor) -> None:
        logits.index_put_((self.samples, self.token_ids), self.values, accumulate=True)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition penalty over prompt and output, presence and frequency over output.

    Only tokens that have occurred change. A token that occurred several times is computed several times, with the
    same result.
    """

    samples: torch.Tensor  # [num_rows] int64, and so on
    rows: torch.Tensor
    positions: torch.Tensor
    prompt_lens: torch.Tensor
    repetition: torch.Tensor  # [num_rows] float32, and so on
    presence: torch.Tensor
    frequency: torch.Tensor
    longest: int
    """The largest of the positions."""
    scales: bool
    """True if a repetition penalty is not 1."""
    counts: bool
    """True if a presence or frequency penalty is not 0."""

    def apply(self, logits: torch.Tensor, token_table: torch.Tensor) -> None:
        for begin in range(0, len(self.samples), _ROWS_AT_ONCE):
            self._apply(slice(begin, begin + _ROWS_AT_ONCE), logits, token_table)

    def _apply(self, part: slice, logits: torch.Tensor, token_table: torch.Tensor) -> None:
        index = self.samples[part, None]
        seen = token_table[self.rows[part], : self.longest]
        at = torch.arange(seen.shape[1], device=seen.device)
        is_known = at < self.positions[part, None]
        seen = torch.where(is_known, seen, seen[:, :1])  # ignores leftovers of a longer row
        scores = logits[index, seen]
        if self.scales:
            factor = self.repetition[part, None]
            scores = torch.where(scores > 0, scores / factor, scores * factor)
        if self.counts:
            is_output = is_known & (at >= self.prompt_lens[part, None])
            table = torch.zeros(len(seen), logits.shape[1], dtype=torch.int32, device=seen.device)
            counts = table.scatter_add_(1, seen, is_output.to(torch.int32)).gather(1, seen)
            scores -= self.presence[part, None] * (counts > 0)
            scores -= self.frequency[part, None] * counts
        logits[index, seen] = scores


@dataclass(frozen=True, slots=True)
class Whitelists:
    """The allowed tokens of some samples, a bit per token, lowest bit first. Tokens past the bits are forbidden."""

    samples: torch.Tensor  # [num_rows] int64
    bits: torch.Tensor  # [num_rows, num_bytes] uint8

    def apply(self, logits: torch.Tensor) -> None:
        vocab_size = logits.shape[1]
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        barred = (self.bits[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] == 0
        if missing := vocab_size - barred.shape[1]:
            barred = torch.nn.functional.pad(barred, (0, missing), value=True)
        logits[self.samples] = logits[self.samples].masked_fill_(barred, -torch.inf)


@dataclass(frozen=True, slots=True)
class ForbiddenTokens:
    """Individually forbidden tokens: the last of a token sequence, if all its other tokens directly precede it.

    Only output is compared, as in vLLM: the prompt may end with the start of a bad word.
    """

    samples: torch.Tensor  # [num_bars] int64, and so on
    rows: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    prompt_lens: torch.Tensor
    prefixes: torch.Tensor
    """[num_bars, width] int64, aligned to the right and padded with -1."""

    def apply(self, logits: torch.Tensor, token_table: torch.Tensor) -> None:
        width = self.prefixes.shape[1]
        at = self.positions[:, None] - width + torch.arange(width, device=logits.device)
        window = token_table[self.rows[:, None], at.clamp(min=0)]
        window = torch.where(at >= self.prompt_lens[:, None], window, _NO_TOKEN)
        has_come = ((self.prefixes == window) | (self.prefixes == _ANY_TOKEN)).all(dim=1)
        bounds = torch.where(has_come, -torch.inf, torch.inf)
        # Several may end in one token: a minimum does not depend on the order of writes.
        flat = self.samples * logits.shape[1] + self.token_ids
        logits.view(-1).scatter_reduce_(0, flat, bounds, "amin")


@dataclass(frozen=True, slots=True)
class StagedChanges:
    """The changes of a step's logits: bias, then penalties, then forbidden tokens."""

    samples: torch.Tensor
    """[num_changed] int64, in order."""
    biases: Biases | None
    penalties: Sequence[Penalties]
    whitelists: Whitelists | None
    bars: Sequence[ForbiddenTokens]

    def apply(self, logits: torch.Tensor, token_table: torch.Tensor) -> None:
        """Change logits in place.

        Args:
            logits: [num_samples, vocab_size] float32.
            token_table: [num_rows, max_len], the tokens so far.
        """
        if self.biases is not None:
            self.biases.apply(logits)
        for penalties in self.penalties:
            penalties.apply(logits, token_table)
        if self.whitelists is not None:
            self.whitelists.apply(logits)
        for bars in self.bars:
            bars.apply(logits, token_table)
