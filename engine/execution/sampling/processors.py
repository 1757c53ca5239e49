"""A request's parameters that change its logits before temperature: bias, penalties, forbidden tokens.

The order is logit_bias, then penalties, then forbidden tokens. Sources of these are a grammar,
`allowed_token_ids`, `bad_words`, and EOS and stop tokens before `min_tokens`. No source overrides another: if
no token remains, none is sampled, and the request fails. However, a structure that can only end may do so
before `min_tokens`.

This module combines a step's changes on the host; `StagedChanges` applies them. Only the device reads the
newest tokens of a row, because the host does not have them yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pagemill.engine.execution.sampling.staged_changes import (
    Biases,
    ForbiddenTokens,
    Penalties,
    StagedChanges,
    Whitelists,
)
from pagemill.engine.execution.staging import Transfer
from pagemill.engine.plan import NewRow, Sample
from pagemill.engine.sampling_params import SamplingParams

_ANY_TOKEN = -1

Bits = npt.NDArray[np.uint8]
"""A bit per token id, lowest bit first; tokens past the end are not in the set."""


@dataclass(frozen=True, slots=True)
class SampleWork:
    """One sample: its index, and its row."""

    sample: Sample
    row: NewRow

    @property
    def params(self) -> SamplingParams:
        return self.row.params

    @property
    def output_position(self) -> int:
        """Number of tokens generated before this one, including resumed ones."""
        return self.sample.position - self.row.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class WordGroup:
    """Forbidden token sequences of similar lengths."""

    shortest: int
    """Tokens before the last one of the shortest sequence: earlier in an output, none can occur."""
    prefixes: npt.NDArray[np.int64]
    """[num_words, width], the tokens before the last one, aligned to the right."""
    last: npt.NDArray[np.int64]
    """[num_words]"""


class RowConstraints:
    """A row's parameters as sets of tokens, built once."""

    def __init__(self, row: NewRow, eos_token_ids: tuple[int, ...]) -> None:
        params = row.params
        self.row = row
        self.penalises = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self.allowed = None if params.allowed_token_ids is None else as_bits(params.allowed_token_ids)
        self.words = word_groups(row.bad_word_ids)
        self.ends = frozenset((*eos_token_ids, *params.stop_token_ids)) if params.min_tokens else frozenset()

    def whitelist(self, sample: Sample) -> Bits | None:
        """Return the tokens that both the grammar and `allowed_token_ids` allow; None: all."""
        grammar = grammar_bits(sample)
        if grammar is None or self.allowed is None:
            return self.allowed if grammar is None else grammar
        width = min(len(grammar), len(self.allowed))
        return grammar[:width] & self.allowed[:width]

    def barred_ends(self, work: SampleWork) -> Iterable[int]:
        """Return the tokens that would end the sequence too early, unless its grammar allows no others."""
        if not self.ends or work.output_position >= work.params.min_tokens:
            return ()
        grammar = grammar_bits(work.sample)
        if grammar is not None and not _has_others(grammar, self.ends):
            return ()
        return self.ends


class LogitsProcessors:
    """Combines the logit changes of a step's samples."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._constraints: dict[int, RowConstraints] = {}
        """Constraints by row; rebuilt when the row is assigned to another sequence."""

    def stage(self, work: Sequence[SampleWork], vocab_size: int, transfer: Transfer) -> StagedChanges | None:
        """Stage the changes; return None if there are none."""
        own = [self._of(item.row) for item in work]
        biased = [number for number, item in enumerate(work) if item.params.logit_bias]
        penalised = [number for number, constraints in enumerate(own) if constraints.penalises]
        lists = {
            number: bits
            for number, (item, constraints) in enumerate(zip(work, own, strict=True))
            if (bits := constraints.whitelist(item.sample)) is not None
        }
        bars = _bars_by_width(work, own, vocab_size)
        barred = (number for entries in bars.values() for number, _ in entries)
        changed = sorted({*biased, *penalised, *lists, *barred})
        if not changed:
            return None
        return StagedChanges(
            transfer.put(np.array(changed, dtype=np.int64)),
            _biases(work, biased, transfer) if biased else None,
            tuple(_penalties(work, numbers, transfer) for numbers in _by_length(work, penalised)),
            _whitelists(lists, transfer) if lists else None,
            tuple(_bars(work, entries, transfer) for entries in bars.values()),
        )

    def _of(self, row: NewRow) -> RowConstraints:
        known = self._constraints.get(row.row)
        if known is None or known.row is not row:
            known = self._constraints[row.row] = RowConstraints(row, self._eos_token_ids)
        return known


def _biases(work: Sequence[SampleWork], numbers: list[int], transfer: Transfer) -> Biases:
    pairs = [(number, *pair) for number in numbers for pair in (work[number].params.logit_bias or {}).items()]
    samples, tokens, values = zip(*pairs, strict=True)
    return Biases(
        transfer.put(np.array(samples, dtype=np.int64)),
        transfer.put(np.array(tokens, dtype=np.int64)),
        transfer.put(np.array(values, dtype=np.float32)),
    )


def _by_length(work: Sequence[SampleWork], numbers: list[int]) -> Iterable[list[int]]:
    """Group samples by the length of their rows: padded to one long row, many short ones would take its time."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(work[number].sample.position.bit_length(), []).append(number)
    return groups.values()


def _penalties(work: Sequence[SampleWork], numbers: list[int], transfer: Transfer) -> Penalties:
    items = [work[number] for number in numbers]
    params = [item.params for item in items]

    def integers(values: list[int]) -> npt.NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    def floats(values: list[float]) -> npt.NDArray[np.float32]:
        return np.array(values, dtype=np.float32)

    put = transfer.put
    return Penalties(
        samples=put(integers(numbers)),
        rows=put(integers([item.sample.row for item in items])),
        positions=put(integers([item.sample.position for item in items])),
        prompt_lens=put(integers([item.row.num_prompt_tokens for item in items])),
        repetition=put(floats([each.repetition_penalty for each in params])),
        presence=put(floats([each.presence_penalty for each in params])),
        frequency=put(floats([each.frequency_penalty for each in params])),
        longest=max(item.sample.position for item in items),
        scales=any(each.repetition_penalty != 1.0 for each in params),
        counts=any(each.presence_penalty or each.frequency_penalty for each in params),
    )


def _whitelists(lists: dict[int, Bits], transfer: Transfer) -> Whitelists:
    packed = np.zeros((len(lists), max(map(len, lists.values()))), dtype=np.uint8)
    for place, bits in enumerate(lists.values()):
        packed[place, : len(bits)] = bits
    return Whitelists(transfer.put(np.array(list(lists), dtype=np.int64)), transfer.put(packed))


def _bars_by_width(
    work: Sequence[SampleWork], own: Sequence[RowConstraints], vocab_size: int
) -> dict[int, list[tuple[int, WordGroup]]]:
    """Return the forbidden sequences that a sample can complete, with the sample's number, by width."""
    found: dict[int, list[tuple[int, WordGroup]]] = {}
    for number, (item, constraints) in enumerate(zip(work, own, strict=True)):
        groups = constraints.words
        if ends := constraints.barred_ends(item):
            groups = (*groups, *word_groups(tuple((token,) for token in ends if token < vocab_size)))
        for group in groups:
            if group.shortest <= item.output_position:
                found.setdefault(group.prefixes.shape[1], []).append((number, group))
    return found


def _bars(
    work: Sequence[SampleWork], entries: Sequence[tuple[int, WordGroup]], transfer: Transfer
) -> ForbiddenTokens:
    groups = [group for _, group in entries]
    facts = np.array(
        [
            (number, item.sample.row, item.sample.position, item.row.num_prompt_tokens)
            for number, item in ((number, work[number]) for number, _ in entries)
        ],
        dtype=np.int64,
    )
    of_each = np.repeat(facts.T, [len(group.last) for group in groups], axis=1)
    last = np.concatenate([group.last for group in groups])
    samples, rows, positions, prompt_lens, token_ids = transfer.put(np.vstack([of_each, last]))
    prefixes = transfer.put(np.concatenate([group.prefixes for group in groups]))
    return ForbiddenTokens(samples, rows, token_ids, positions, prompt_lens, prefixes)


@lru_cache(maxsize=16)
def word_groups(words: tuple[tuple[int, ...], ...]) -> tuple[WordGroup, ...]:
    """Group token sequences by length: padded to the longest, many short ones would take the memory of long ones."""
    by_width: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        by_width.setdefault((1 << (len(word) - 1).bit_length()) - 1, []).append(word)
    groups = []
    for width, alike in by_width.items():
        prefixes = np.full((len(alike), width), _ANY_TOKEN, dtype=np.int64)
        for place, word in enumerate(alike):
            prefixes[place, width + 1 - len(word) :] = word[:-1]
        shortest = min(map(len, alike)) - 1
        groups.append(WordGroup(shortest, prefixes, np.array([word[-1] for word in alike], dtype=np.int64)))
    return tuple(groups)


def as_bits(token_ids: Sequence[int]) -> Bits:
    bits = np.zeros((max(token_ids, default=-1) >> 3) + 1, dtype=np.uint8)
    ids = np.asarray(token_ids, dtype=np.int64)
    np.bitwise_or.at(bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
    return bits


def grammar_bits(sample: Sample) -> Bits | None:
    """Return the tokens that the sequence's grammar allows; None without a grammar."""
    if sample.allowed_token_ids is not None:
        return as_bits(sample.allowed_token_ids)
    if sample.token_mask is None:
        return None
    return np.frombuffer(sample.token_mask, dtype=np.uint8)


def _has_others(bits: Bits, tokens: frozenset[int]) -> bool:
    """Return True if the set contains a token other than these."""
    inside = sum(1 for token in tokens if token >> 3 < len(bits) and bits[token >> 3] >> (token & 7) & 1)
    return int(np.unpackbits(bits).sum()) > inside
