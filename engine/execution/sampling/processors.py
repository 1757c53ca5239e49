"""Applies a request's parameters to its logits before temperature: bias, penalties, and barred tokens.

The order is logit_bias, then penalties, then bars. Bars come from a grammar, `allowed_token_ids`,
`bad_words`, and EOS and stop tokens before `min_tokens`. None overrides another: if they leave no token, none
is sampled, and the request fails. But a structure that can only end may do so before `min_tokens`.

Everything is per row, so a row's result does not depend on its batch, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.engine.plan import NewRow, Sample
from pagemill.engine.sampling_params import SamplingParams

_ROWS_AT_ONCE = 64
"""Penalties count tokens in tables of this many rows by the vocabulary."""
_ANY_TOKEN = -1
_NO_TOKEN = -2


@dataclass(frozen=True, slots=True)
class SampleWork:
    """One sample: its place, and the row it belongs to."""

    sample: Sample
    row: NewRow

    @property
    def params(self) -> SamplingParams:
        return self.row.params

    @property
    def output_position(self) -> int:
        """Tokens generated before this one, including resumed ones."""
        return self.sample.position - self.row.num_prompt_tokens


class BadWords:
    """Token sequences that may not be generated: the last token is barred right after all the others.

    Only output is compared, as in vLLM: the prompt may end in the beginning of a bad word.
    """

    def __init__(self, sequences: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._width = max(map(len, sequences)) - 1
        padded = [[_ANY_TOKEN] * (self._width + 1 - len(ids)) + list(ids) for ids in sequences]
        table = torch.tensor(padded, dtype=torch.int64, device=device)
        self._prefixes = table[:, :-1]  # [num_sequences, width], aligned to the right
        self._lasts = table[:, -1]

    def bar(self, barred: torch.Tensor, tokens: torch.Tensor, num_prompt_tokens: int, position: int) -> None:
        """Mark tokens in `barred` [vocab_size], given the row's `tokens` [max_len] up to `position`."""
        window = torch.full((self._width,), _NO_TOKEN, dtype=torch.int64, device=barred.device)
        num_known = min(self._width, position - num_prompt_tokens)
        window[self._width - num_known :] = tokens[position - num_known : position]
        has_come = ((self._prefixes == window) | (self._prefixes == _ANY_TOKEN)).all(dim=1)
        # Several words may end in one token: a sum has no order in which they could overwrite each other.
        hits = torch.zeros(barred.shape, dtype=torch.int32, device=barred.device)
        barred |= hits.index_add_(0, self._lasts, has_come.to(torch.int32)) > 0


class RowConstraints:
    """A row's parameters as tensors on the device, built once."""

    def __init__(
        self, row: NewRow, eos_token_ids: tuple[int, ...], vocab_size: int, device: torch.device
    ) -> None:
        params = row.params
        self.row = row
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            self.bias = (
                ids,
                torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device),
            )
        self.penalises = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self.allowed: torch.Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed = _as_mask(params.allowed_token_ids, vocab_size, device)
        self.ends: torch.Tensor | None = None
        if params.min_tokens:
            ends = [t for t in (*eos_token_ids, *params.stop_token_ids) if t < vocab_size]
            self.ends = _as_mask(ends, vocab_size, device)
        self.bad_words = BadWords(row.bad_word_ids, device) if row.bad_word_ids else None

    def bars(self, work: SampleWork) -> bool:
        """Return True if any token may be barred for this sample."""
        sample = work.sample
        return (
            sample.allowed_token_ids is not None
            or sample.token_mask is not None
            or self.allowed is not None
            or self.bad_words is not None
            or (self.ends is not None and work.output_position < work.params.min_tokens)
        )


class LogitsProcessors:
    """Applies the parameters of each sample to its logits."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._constraints: dict[int, RowConstraints] = {}
        """Constraints by row; rebuilt when the row goes to another sequence."""

    def apply(self, logits: torch.Tensor, work: list[SampleWork], token_table: torch.Tensor) -> list[int]:
        """Change `logits` in place.

        Args:
            logits: [num_samples, vocab_size] float32.
            token_table: [num_rows, max_len], the tokens so far.

        Returns:
            The changed samples, in order.
        """
        constraints = [self._of(item.row, logits) for item in work]
        biased = [number for number, own in enumerate(constraints) if own.bias is not None]
        penalised = [number for number, own in enumerate(constraints) if own.penalises]
        barred = [number for number, own in enumerate(constraints) if own.bars(work[number])]
        for number in biased:
            bias = constraints[number].bias
            assert bias is not None
            logits[number].index_add_(0, *bias)
        for begin in range(0, len(penalised), _ROWS_AT_ONCE):
            numbers = penalised[begin : begin + _ROWS_AT_ONCE]
            _penalise(logits, numbers, [work[number] for number in numbers], token_table)
        for number in barred:
            _bar(logits[number], work[number], constraints[number], token_table)
        return sorted({*biased, *penalised, *barred})

    def _of(self, row: NewRow, logits: torch.Tensor) -> RowConstraints:
        known = self._constraints.get(row.row)
        if known is None or known.row is not row:
            known = RowConstraints(row, self._eos_token_ids, logits.shape[-1], logits.device)
            self._constraints[row.row] = known
        return known


def _penalise(
    logits: torch.Tensor, numbers: list[int], work: list[SampleWork], token_table: torch.Tensor
) -> None:
    """Apply repetition penalty over prompt and output, presence and frequency over output, in place.

    Only tokens that have occurred are touched. A token that occurred several times is computed several times,
    to the same value.
    """
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device)[:, None]

    index = torch.tensor(numbers, device=device)[:, None]
    rows = torch.tensor([item.sample.row for item in work], device=device)
    seen = token_table[rows, : max(item.sample.position for item in work)]
    at = torch.arange(seen.shape[1], device=device)
    is_known = at < column([item.sample.position for item in work])
    seen = torch.where(is_known, seen, seen[:, :1])  # ignores leftovers of a longer row
    scores = logits[index, seen]
    if any(item.params.repetition_penalty != 1.0 for item in work):
        factor = column([item.params.repetition_penalty for item in work])
        scores = torch.where(scores > 0, scores / factor, scores * factor)
    if any(item.params.presence_penalty or item.params.frequency_penalty for item in work):
        is_output = is_known & (at >= column([item.row.num_prompt_tokens for item in work]))
        table = torch.zeros(len(work), logits.shape[1], dtype=torch.int32, device=device)
        counts = table.scatter_add_(1, seen, is_output.to(torch.int32)).gather(1, seen)
        scores -= column([item.params.presence_penalty for item in work]) * (counts > 0)
        scores -= column([item.params.frequency_penalty for item in work]) * counts
    logits[index, seen] = scores


def _bar(row: torch.Tensor, work: SampleWork, own: RowConstraints, token_table: torch.Tensor) -> None:
    """Set barred tokens to minus infinity, in place."""
    grammar = _grammar_mask(work.sample, row)
    allowed = torch.ones(row.shape, dtype=torch.bool, device=row.device) if grammar is None else grammar
    if own.ends is not None and work.output_position < work.params.min_tokens:
        ends = own.ends
        if grammar is not None:
            ends = ends & (grammar & ~ends).any()
        allowed = allowed & ~ends
    if own.allowed is not None:
        allowed = allowed & own.allowed
    if own.bad_words is not None:
        barred = torch.zeros_like(allowed)
        tokens = token_table[work.sample.row]
        own.bad_words.bar(barred, tokens, work.row.num_prompt_tokens, work.sample.position)
        allowed = allowed & ~barred
    row.masked_fill_(~allowed, -torch.inf)


def _grammar_mask(sample: Sample, like: torch.Tensor) -> torch.Tensor | None:
    """Return the tokens that the sequence's grammar allows, [vocab_size] bool; None without a grammar."""
    if sample.allowed_token_ids is not None:
        return _as_mask(sample.allowed_token_ids, like.shape[0], like.device)
    if sample.token_mask is None:
        return None
    packed = torch.frombuffer(bytearray(sample.token_mask), dtype=torch.uint8).to(like.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=like.device)
    bits = (packed[:, None] >> shifts & 1).flatten()[: like.shape[0]]
    # The model's vocabulary may be padded past the tokenizer's: those tokens have no text.
    return torch.nn.functional.pad(bits, (0, like.shape[0] - bits.shape[0])).to(torch.bool)


def _as_mask(token_ids: list[int] | tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    mask[torch.tensor(list(token_ids), dtype=torch.int64, device=device)] = True
    return mask
