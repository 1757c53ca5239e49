"""Predictions are the tokens after the latest earlier occurrence of the last tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.scheduling.speculation.prompt_lookup import (
    MAX_INDEXED,
    MIN_MATCH,
    Acceptance,
    PromptLookup,
)

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def looked_up(*chunks: list[int]) -> PromptLookup:
    lookup = PromptLookup(Acceptance())
    for chunk in chunks:
        lookup.extend(chunk)
    return lookup


def sources(history: list[int]) -> set[int]:
    """The positions that follow an earlier occurrence of the last tokens."""
    last = history[-MIN_MATCH:]
    ends = range(MIN_MATCH, len(history))
    return {end for end in ends if len(last) == MIN_MATCH and history[end - MIN_MATCH : end] == last}


@given(tokens, tokens)
def test_a_prediction_continues_an_earlier_occurrence(prompt: list[int], output: list[int]) -> None:
    lookup = looked_up(prompt, *([token] for token in output))
    history = prompt + output
    predicted = lookup.predict(4)
    if not predicted:
        assert not lookup.num_matched
        return
    assert any(
        predicted == [history[end + index % (len(history) - end)] for index in range(4)]
        for end in sources(history)
    )


@given(tokens, tokens)
def test_something_is_predicted_if_anything_occurred_before(prompt: list[int], output: list[int]) -> None:
    history = prompt + output
    lookup = looked_up(prompt, *([token] for token in output))
    assert bool(lookup.predict(1)) == bool(sources(history))


@given(tokens, tokens)
def test_it_does_not_matter_how_tokens_arrive(prompt: list[int], output: list[int]) -> None:
    one_by_one = looked_up(prompt, *([token] for token in output))
    assert looked_up(prompt, output).predict(8) == one_by_one.predict(8)


def test_a_repetition_is_continued() -> None:
    assert looked_up([1, 2, 1, 2, 1, 2, 1]).predict(5) == [2, 1, 2, 1, 2]


def test_a_long_match_is_followed_past_a_newer_short_one() -> None:
    source = [1, 2, 3, 4, 5, 6, 7, 8]
    lookup = looked_up([*source, 9, 4, 5, 6, 0, 9], *([token] for token in source[:6]))
    assert lookup.num_matched == 6
    assert lookup.predict(2) == [7, 8]


def test_predictions_are_judged_though_nothing_was_drafted() -> None:
    acceptance = Acceptance()
    lookup = PromptLookup(acceptance)
    lookup.extend([*range(50), 0, 1, 2])
    before = acceptance.expected(3)
    lookup.extend([3])
    assert acceptance.expected(3) > before
    lookup.extend([99])
    assert lookup.predict(1) == []


def test_only_so_many_places_are_remembered() -> None:
    lookup = looked_up(list(range(2 * MAX_INDEXED)), [5, 6, 7])
    lookup.extend(range(3 * MAX_INDEXED, 4 * MAX_INDEXED))
    assert len(lookup._next) <= MAX_INDEXED
    lookup.extend([20, 21, 22])
    assert lookup.predict(2) == [23, 24]
