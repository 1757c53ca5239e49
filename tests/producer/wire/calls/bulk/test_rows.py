"""Rows of one call: a pattern and their common part yield the same headers as separate calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.errors import RedisRefused
from pagemill.producer.wire.schema.signing import Keys
from tests.producer.driving import Queue

PREPARER = Preparer("q", "acme", Keys())
SHAPES = st.sampled_from(
    [
        {}, {"temperature": 0.0, "dedupe": True}, {"n": 2, "max_attempts": 5, "priority": "low"},
        {"ttl": 3600.0, "stream": True}, {"delay": 3600.0, "tenant": "other"},
        {"webhook": "https://example.com/hook", "keep_input": True}, {"adapter": "red"},
        {"revision": "a" * 40},
    ]
)  # fmt: skip
ROW = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["short", "x" * 300, "y" * 600]),
        "key": st.none() | st.text(min_size=1, max_size=12),
        "metadata": st.none() | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    }
)
PASSING = ("at", "due_at", "deadline")
"""Fields with the time of the submit."""


def records(queue: Queue) -> dict[str, Any]:
    """The stored data of each job, and where it waits."""
    found: dict[str, Any] = {}
    for name in queue.names():
        key = f"{queue.prefix}{name}"
        if name.startswith("job:"):
            found[name] = {
                field: value
                for field, value in queue.client.hgetall(key).items()
                if field.decode() not in PASSING
            }
        elif name.startswith(("in:", "md:")):
            found[name] = queue.client.get(key)
        elif name.startswith("wait:"):
            found[name] = queue.client.zrange(key, 0, -1, withscores=True)
    return found


@pytest.mark.slow
@given(shapes=st.lists(st.tuples(SHAPES, ROW), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_is_stored_as_it_is_by_itself(own_queue: Queue, shapes: list[tuple[Any, Any]]) -> None:
    jobs = [{"model": "m"} | shape | row for shape, row in shapes for _ in range(2)]
    items = list(PREPARER.items(jobs, "b", on_invalid="record", by_content=True, compares_work=True))
    own_queue.client.flushdb()
    call = submissions.submit(own_queue.name, items, batch_id="b")
    together = [reply.status for reply in own_queue.run(call)]
    stored = records(own_queue)
    own_queue.client.flushdb()
    alone = []
    for item in items:
        alone += own_queue.run(submissions.submit(own_queue.name, [item], batch_id="b"))
    assert together == [reply.status for reply in alone]
    assert stored == records(own_queue)


def row(job_id: str = "b", key: str = "k", affinity: str = "abc", rest: str = "", cost: str = "5") -> bytes:
    lane = "1:1:default:m"
    text = f'"id":"{job_id}","lane":"{lane}","cost":{cost},"affinity":"{affinity}","key":"{key}"{rest}'
    return f"{{{text}}}".encode()


@pytest.mark.parametrize(
    "header",
    [
        row(job_id="a" * 65),
        row(job_id="a b"),
        row(key="k" * 1025),
        row(affinity="a" * 33),
        row(affinity=f'abc","work":"{"w" * 65}'),
        row(cost="1" + "0" * 15 + "1"),
        row(rest=',"n":1000'),
        row(rest=',"color":"red"'),
        row(rest=',"idem":"other:k"'),
        row(rest="}"),
        row(rest=', "n":2')[:-1],
    ],
)
def test_a_bad_row_behind_good_ones_stores_nothing(queue: Queue, header: bytes) -> None:
    good = [Submission(f"g{number}", row(f"g{number}"), b"{}") for number in range(2)]
    with pytest.raises(RedisRefused, match="bad header at ARGV 7"):
        queue.run(submissions.submit(queue.name, [*good, Submission("b", header, b"{}")]))
    assert queue.names() == set()


def test_what_rows_share_is_theirs_alone(queue: Queue) -> None:
    """Another lane's rows, with the same text after their keys, are checked separately."""
    mine = ',"idem":"default:k","digest":"d"'
    items = [Submission(name, row(name, rest=mine), b"{}") for name in "ab"]
    replies = queue.run(submissions.submit(queue.name, items))
    assert [(reply.status, reply.job_id) for reply in replies] == [("created", "a"), ("same", "a")]
    theirs = row("c", rest=mine).replace(b"1:1:default:m", b"1:1:evil:m")
    with pytest.raises(RedisRefused, match="bad header at ARGV 5"):
        queue.run(submissions.submit(queue.name, [items[0], Submission("c", theirs, b"{}")]))
