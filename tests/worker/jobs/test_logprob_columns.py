"""Packed log-probabilities equal the original ones, and are small."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.plan import TokenLogprobs
from pagemill.producer.wire.schema.outputs import PositionLogprobs
from pagemill.worker.jobs.logprob_columns import LogprobColumns, prompt_logprobs_json

TOKEN_IDS = st.integers(0, 2**31 - 1)
VALUES = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
ENTRIES = st.builds(
    TokenLogprobs, TOKEN_IDS, st.none() | VALUES, st.lists(st.tuples(TOKEN_IDS, VALUES), max_size=20)
)


def as_read(text: bytes) -> list[TokenLogprobs | None]:
    rows = (None if row is None else PositionLogprobs(**row) for row in json.loads(text))
    return [
        row
        and TokenLogprobs(
            row.chosen.token_id, row.chosen.logprob, [(t.token_id, t.logprob or 0.0) for t in row.top]
        )
        for row in rows
    ]


@pytest.mark.slow
@given(st.lists(ENTRIES, max_size=150), st.integers(0, 150))
def test_what_goes_in_comes_out(entries: list[TokenLogprobs], cut: int) -> None:
    columns = LogprobColumns(str)
    columns.extend(entries[:cut])
    columns.extend(entries[cut:])
    assert as_read(columns.json()) == entries
    assert len(columns) == len(entries)
    again = LogprobColumns(str)
    again.extend_saved(columns.positions())
    assert again.json() == columns.json()
    assert len(list(columns.positions(start=cut))) == max(0, len(entries) - cut)


@given(st.lists(st.none() | ENTRIES, max_size=100))
def test_a_prompts_are_written_the_same_way(entries: list[TokenLogprobs | None]) -> None:
    expected = [entry or TokenLogprobs(number, None) for number, entry in enumerate(entries)]
    assert as_read(prompt_logprobs_json(entries, range(100), str)) == expected


@pytest.mark.slow
def test_memory_is_bounded_while_they_are_held_and_while_they_are_written() -> None:
    columns = LogprobColumns(str)
    tracemalloc.start()
    for position in range(6000):
        columns.extend([TokenLogprobs(position, -0.5, [(token, -1.0 / 3.0) for token in range(20)])])
    held, _ = tracemalloc.get_traced_memory()
    text = columns.json()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 16 * columns.num_entries
    assert peak < held + 3 * len(text) + (1 << 20)
