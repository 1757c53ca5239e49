"""Comparison of two results of one job: tokens, then derived values, then all numbers to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal

from pagemill.producer.wire.schema.outputs import Output, PositionLogprobs, Result, Rows, WireModel

Exactness = Literal["bitwise", "token", "close", "neither"]
"""bitwise: everything that both record is equal. token: token ids, text and labels are equal, numbers differ. close:
numbers of vectors, labels or scores differ, but no row by more than `MAX_DISTANCE` of its length, nor its cosine from 1
by more than 1 - `MIN_COSINE`. neither: anything else."""
MIN_COSINE = 0.9999
MAX_DISTANCE = 0.01
_DISCRETE = ("text", "finish_reason", "reasoning", "label")


class Difference(WireModel):
    """The first position where the replay differs from the stored result."""

    what: str
    """token, text, finish_reason, reasoning, tool_calls, label, logprob, prompt_logprob, label_prob, row or shape."""
    output: int = 0
    """The sample, or the row."""
    position: int | None = None
    """The index of the token in its output or prompt, of the character in its text, of the number in its row."""
    stored: int | float | str | None = None
    """A token id, a number or a word; None: the stored result had ended before. Never text."""
    replayed: int | float | str | None = None
    stored_logprob: float | None = None
    """Log-probability of the stored token by its worker; as scored on a live worker if it was not recorded."""
    replayed_logprob: float | None = None
    gap: float | None = None
    """The distance of both tokens' log-probabilities, scored by one worker after the common prefix."""


class Comparison(WireModel):
    """The equality of two results."""

    exactness: Exactness
    compared: tuple[str, ...]
    """The properties that both record."""
    difference: Difference | None = None
    max_logprob_difference: float | None = None
    """Maximum over the log-probabilities of the same tokens at the same positions, if there are any."""
    min_cosine: float | None = None
    """Minimum over the rows of a job for vectors, labels or scores."""


def compare(stored: Result, replayed: Result) -> Comparison:
    """Compare two results of the same work.

    Args:
        stored: the result of the original job.
        replayed: the result of its copy.

    Returns:
        How equal they are, with the first difference.
    """
    if stored.rows is not None or replayed.rows is not None:
        return _compare_rows(stored, replayed)
    discrete = next(_discrete_differences(stored.outputs, replayed.outputs), None)
    pairs = list(_numbers(stored, replayed))
    numeric = next((found for found in pairs if not _same_bits(found.stored, found.replayed)), None)
    gaps = [
        abs(pair.stored - pair.replayed)
        for pair in pairs
        if isinstance(pair.stored, float) and isinstance(pair.replayed, float) and pair.what != "label_prob"
    ]
    exactness: Exactness = "neither" if discrete else "token" if numeric else "bitwise"
    return Comparison(
        exactness=exactness,
        compared=("tokens", "text", *sorted({f"{pair.what}s" for pair in pairs})),
        difference=discrete or numeric,
        max_logprob_difference=max(gaps, default=None),
    )


def _discrete_differences(stored: Sequence[Output], replayed: Sequence[Output]) -> Iterator[Difference]:
    if len(stored) != len(replayed):
        yield Difference(what="shape", stored=len(stored), replayed=len(replayed))
    for ours, theirs in zip(stored, replayed, strict=False):
        for position, (one, other) in enumerate(zip_longest(ours.token_ids, theirs.token_ids)):
            if one != other:
                yield Difference(
                    what="token",
                    output=ours.index,
                    position=position,
                    stored=one,
                    replayed=other,
                    stored_logprob=_logprob(ours, position),
                    replayed_logprob=_logprob(theirs, position),
                )
                break
    for ours, theirs in zip(stored, replayed, strict=False):
        for name in _DISCRETE:
            one, other = getattr(ours, name), getattr(theirs, name)
            if one != other:
                yield _word_difference(name, ours.index, one, other)
        if _calls(ours) != _calls(theirs):
            yield Difference(what="tool_calls", output=ours.index)


def _word_difference(name: str, index: int, one: str | None, other: str | None) -> Difference:
    if name in ("finish_reason", "label"):
        return Difference(what=name, output=index, stored=one, replayed=other)
    pairs = zip_longest(one or "", other or "")
    position = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
    return Difference(what=name, output=index, position=position)


def _calls(output: Output) -> list[tuple[str, str]]:
    """Return the tool calls without their ids, which depend on the job."""
    return [(call.function.name, call.function.arguments) for call in output.tool_calls]


def _logprob(output: Output, position: int) -> float | None:
    recorded = output.logprobs or ()
    return recorded[position].chosen.logprob if position < len(recorded) else None


def _numbers(stored: Result, replayed: Result) -> Iterator[Difference]:
    """Yield every pair of recorded numbers for the same token, whether they differ or not."""
    for ours, theirs in zip(stored.outputs, replayed.outputs, strict=False):
        yield from _logprob_pairs("logprob", ours.index, ours.logprobs or (), theirs.logprobs or ())
        if ours.logprob is not None or theirs.logprob is not None:
            yield Difference(what="logprob", output=ours.index, stored=ours.logprob, replayed=theirs.logprob)
        ours_probs, theirs_probs = ours.label_probs or {}, theirs.label_probs or {}
        for at, label in enumerate(ours_probs):
            yield Difference(
                what="label_prob",
                output=ours.index,
                position=at,
                stored=ours_probs[label],
                replayed=theirs_probs.get(label),
            )
    yield from _logprob_pairs(
        "prompt_logprob", 0, stored.prompt_logprobs or (), replayed.prompt_logprobs or ()
    )


def _logprob_pairs(
    what: str,
    index: int,
    stored: Sequence[PositionLogprobs | None],
    replayed: Sequence[PositionLogprobs | None],
) -> Iterator[Difference]:
    for position, (one, other) in enumerate(zip_longest(stored, replayed)):
        if one is None and other is None:
            continue
        ours = () if one is None else (one.chosen, *one.top)
        theirs = () if other is None else (other.chosen, *other.top)
        if ours and theirs and ours[0].token_id != theirs[0].token_id:
            return  # the tokens before the rest differ
        for left, right in zip_longest(ours, theirs):
            if left is None or right is None or left.token_id != right.token_id:
                # The alternatives differ, or have another order: their numbers changed.
                yield Difference(
                    what=what,
                    output=index,
                    position=position,
                    stored=None if left is None else left.token_id,
                    replayed=None if right is None else right.token_id,
                )
                break
            yield Difference(
                what=what, output=index, position=position, stored=left.logprob, replayed=right.logprob
            )


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    return bool(one == other)


def _compare_rows(stored: Result, replayed: Result) -> Comparison:
    ours, theirs = stored.rows, replayed.rows
    if ours is None or theirs is None or ours.shape != theirs.shape or stored.labels != replayed.labels:
        shapes = ["x".join(map(str, rows.shape)) if rows is not None else "none" for rows in (ours, theirs)]
        difference = Difference(what="shape", stored=shapes[0], replayed=shapes[1])
        return Comparison(exactness="neither", compared=("rows",), difference=difference)
    if (ours.dtype, ours.raw) == (theirs.dtype, theirs.raw):
        return Comparison(exactness="bitwise", compared=("rows",), min_cosine=1.0)
    cosine, distance, difference = _rows_apart(ours, theirs)
    return Comparison(
        exactness="close" if cosine >= MIN_COSINE and distance <= MAX_DISTANCE else "neither",
        compared=("rows",),
        difference=difference,
        min_cosine=cosine,
    )


def _rows_apart(ours: Rows, theirs: Rows) -> tuple[float, float, Difference]:
    """Return the minimum cosine and the maximum relative distance of two rows, and the first number that differs."""
    cosine, distance, first = 1.0, 0.0, Difference(what="row")
    for index, (one, other) in enumerate(zip(ours.to_lists(), theirs.to_lists(), strict=True)):
        if one == other:
            continue
        if first.position is None:
            at = next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            first = Difference(what="row", output=index, position=at, stored=one[at], replayed=other[at])
        lengths = math.hypot(*one), math.hypot(*other)
        distance = max(distance, math.dist(one, other) / max(lengths))
        product = sum(left * right for left, right in zip(one, other, strict=True))
        cosine = min(cosine, product / (lengths[0] * lengths[1]) if all(lengths) else 0.0)
    return cosine, distance, first
