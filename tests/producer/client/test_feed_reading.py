"""The events that a reader of a job's stream receives when the job restarts, read by read."""

from __future__ import annotations

from typing import Any

from pagemill.producer.client import flows
from pagemill.producer.client.effects import Emit, Wait, Watch
from pagemill.producer.client.feed_reader import FeedReader
from pagemill.producer.wire.calls.reads import Feed
from pagemill.producer.wire.schema.outputs import (
    Delta,
    Output,
    PositionLogprobs,
    Result,
    StreamEvent,
    TokenLogprob,
    Usage,
)
from tests.producer.driving import Queue, delta


class Reader:
    """A stream that reads its job only when the test calls it."""

    def __init__(self, queue: Queue, job_id: str) -> None:
        self._queue = queue
        self._flow = flows.stream(queue.name, job_id)
        watch = next(self._flow)
        assert isinstance(watch, Watch), "news between a read and a wait are not lost"
        self._asked: Any = next(self._flow)

    def look(self) -> list[tuple[str, int, str]]:
        """The events: type, sample and text of each."""
        events: list[StreamEvent] = []
        try:
            while not isinstance(self._asked, Wait):
                if isinstance(self._asked, Emit):
                    events.append(self._asked.item)
                    self._asked = next(self._flow)
                else:
                    self._asked = self._flow.send(self._queue.run(self._asked))
            self._asked = next(self._flow)
        except StopIteration:
            pass
        return [(event.type, event.index, event.text) for event in events]


def begun_again(queue: Queue) -> tuple[Reader, Any]:
    """A reader that has text of two samples, and has seen that none of it is left."""
    queue.submit("job", n=2)
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, text="old "), delta(0, 1, index=1, text="too "))
    reader = Reader(queue, "job")
    assert reader.look() == [("snapshot", 0, "old "), ("snapshot", 1, "too ")]
    queue.retry(job, restart=True)
    assert reader.look() == []
    queue.make_due("job")
    return reader, queue.pull_one()


def test_a_late_reader_gets_one_event_for_several_tokens(queue: Queue) -> None:
    queue.submit("job", n=2)
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, text="a "), delta(0, 1, index=1, text="x "))
    reader = Reader(queue, "job")
    assert reader.look() == [("snapshot", 0, "a "), ("snapshot", 1, "x ")]
    for position, word in enumerate(("b ", "c ", "d "), 1):
        queue.checkpoint(job, delta(position, 10 + position, text=word))
    queue.checkpoint(job, delta(1, 3, index=1, text="y "))
    assert reader.look() == [("token", 0, "b c d "), ("token", 1, "y ")]


def test_each_sample_replaces_what_was_told_before(queue: Queue) -> None:
    reader, job = begun_again(queue)
    queue.checkpoint(job, delta(0, 2, text="new"))
    assert reader.look() == [("snapshot", 0, "new")]
    queue.checkpoint(job, delta(1, 3, text="er"), delta(0, 4, index=1, text="also"))
    assert reader.look() == [("token", 0, "er"), ("snapshot", 1, "also")]
    queue.checkpoint(job, delta(1, 5, index=1, text=" new"))
    assert reader.look() == [("token", 1, " new")]


def test_a_result_without_a_feed_replaces_it_too(queue: Queue) -> None:
    reader, job = begun_again(queue)
    queue.commit(job, "short")
    assert reader.look() == [("snapshot", 0, "short"), ("end", 0, "")]


def test_log_probabilities_are_told_once_and_not_kept() -> None:
    def grown(*positions: int) -> Feed:
        deltas = [
            Delta(index=0, offset=at, token_ids=(at,), text="x", logprobs=(logprobs(at),)) for at in positions
        ]
        return Feed("running", 1, 1, deltas, None)

    def logprobs(at: int) -> PositionLogprobs:
        return PositionLogprobs(chosen=TokenLogprob(token_id=at, logprob=-1.0, text="x"))

    reader = FeedReader("job")
    whole = Output(index=0, text="x" * 9, token_ids=tuple(range(9)), logprobs=tuple(map(logprobs, range(9))))
    told: list[int] = []
    ended = Feed("succeeded", 1, 1, [], result(whole))
    for feed in (grown(0, 1), grown(2), grown(), grown(3, 4, 5), ended):
        for event in reader.read(feed):
            told += [position.chosen.token_id for position in event.logprobs or ()]
            assert len(event.logprobs or ()) == len(event.token_ids)
        assert not any(sample.logprobs for sample in reader._samples.values())
    assert told == list(range(9))


def result(output: Output) -> Result:
    return Result(
        id="job", model="m", outputs=(output,), usage=Usage(prompt_tokens=1, completion_tokens=9), seed=1
    )
