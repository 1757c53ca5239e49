"""One reader's position in the feed of a streaming job: converts new deltas to events."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.producer.wire.calls.reads import Feed
from pagemill.producer.wire.schema.outputs import Delta, Output, PositionLogprobs, StreamEvent
from pagemill.producer.wire.schema.text.chat import ToolCall
from pagemill.producer.wire.schema.text.parsed_text import ParsedText, begins_with, new_call_parts


@dataclass(frozen=True, slots=True)
class _Mark:
    """The position in a sample."""

    tokens: int
    characters: int
    reasoning: int
    calls: tuple[ToolCall, ...]


@dataclass(slots=True)
class _Sample:
    """The part of one sample that a reader has received."""

    index: int
    parsed: ParsedText | None = None
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    """Of the tokens from `num_sent` on, since those of a long output would take megabytes."""
    num_sent: int = 0
    """Number of tokens that events have returned."""

    @classmethod
    def from_output(cls, output: Output) -> _Sample:
        return cls(
            output.index,
            text=output.text,
            reasoning=output.reasoning or "",
            calls=output.tool_calls,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
        )

    def mark(self) -> _Mark:
        return _Mark(len(self.token_ids), len(self.text), len(self.reasoning), self.calls)

    def grow(self, delta: Delta, job_id: str) -> None:
        if self.parsed is None:
            self.parsed = ParsedText(delta.syntax, job_id, delta.index)
        self.parsed.add(delta.text, is_end=delta.finish_reason is not None)
        fields = self.parsed.output_fields()
        self.text, self.reasoning, self.calls = (
            fields["text"],
            fields["reasoning"] or "",
            fields["tool_calls"],
        )
        self.token_ids += delta.token_ids
        if delta.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs

    def forget(self) -> None:
        """Drop data that events have returned and that later events do not repeat."""
        self.num_sent = len(self.token_ids)
        if self.logprobs is not None:
            self.logprobs = []

    def begins(self, grown: _Sample) -> bool:
        """Return whether `grown` continues this."""
        return (
            grown.token_ids[: len(self.token_ids)] == self.token_ids
            and grown.text.startswith(self.text)
            and grown.reasoning.startswith(self.reasoning)
            and begins_with(grown.calls, self.calls)
        )

    def has_all_of(self, other: _Sample) -> bool:
        return (self.text, self.reasoning, self.calls, self.token_ids) == (
            other.text,
            other.reasoning,
            other.calls,
            other.token_ids,
        )

    def gain(self, attempt: int, since: _Mark) -> StreamEvent:
        """Return a token event for the additions since the mark."""
        return StreamEvent(
            type="token",
            attempt=attempt,
            index=self.index,
            offset=since.tokens,
            token_ids=tuple(self.token_ids[since.tokens :]),
            text=self.text[since.characters :],
            logprobs=None if self.logprobs is None else tuple(self.logprobs[since.tokens - self.num_sent :]),
            reasoning=self.reasoning[since.reasoning :],
            tool_calls=new_call_parts(since.calls, self.calls),
        )

    def snapshot(self, attempt: int) -> StreamEvent:
        return StreamEvent(
            type="snapshot",
            attempt=attempt,
            index=self.index,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            reasoning=self.reasoning,
            tool_calls=new_call_parts((), self.calls),
        )


class FeedReader:
    """Stores everything that was read, to compare a result or a restart with it."""

    def __init__(self, job_id: str) -> None:
        self.epoch = 0
        self.position = 0
        self._job_id = job_id
        self._fresh = True
        """No delta of this epoch has been read yet: existing output is sent as snapshots."""
        self._samples: dict[int, _Sample] = {}
        self._stale: set[int] = set()
        """Samples whose text was sent in an earlier epoch: a snapshot has to replace it."""

    def read(self, feed: Feed) -> list[StreamEvent]:
        if feed.epoch != self.epoch:
            self.epoch, self.position, self._fresh = feed.epoch, 0, True
            self._stale |= set(self._samples)
            self._samples = {}
        before: dict[int, _Mark] = {}
        """Of samples that have grown, in the order in which they grew."""
        as_a_whole: set[int] = set()
        for delta in feed.deltas:
            sample = self._samples.get(delta.index)
            if sample is None:
                sample = self._samples[delta.index] = _Sample(delta.index)
            if self._fresh or delta.index in self._stale:
                as_a_whole.add(delta.index)
            elif delta.index not in before:
                before[delta.index] = sample.mark()
            sample.grow(delta, self._job_id)
        # A slow reader gets one event for several tokens, and so catches up.
        events = [self._samples[index].gain(feed.attempt, mark) for index, mark in before.items()]
        events += [self._samples[index].snapshot(feed.attempt) for index in sorted(as_a_whole)]
        for index in before.keys() | as_a_whole:
            self._samples[index].forget()
        self._stale -= as_a_whole
        self._fresh = False
        self.position += len(feed.deltas)
        for output in feed.result.outputs if feed.result else ():
            events += self._rest(feed.attempt, _Sample.from_output(output))
        return events

    def _rest(self, attempt: int, whole: _Sample) -> list[StreamEvent]:
        """Return events for the part of the result that is not in the feed, which is removed once the result exists."""
        seen = self._samples.get(whole.index) or _Sample(whole.index)
        self._samples[whole.index] = whole
        if whole.index in self._stale:
            self._stale.discard(whole.index)
            events = [whole.snapshot(attempt)]
        elif whole.has_all_of(seen):
            events = []
        else:
            events = [whole.gain(attempt, seen.mark()) if seen.begins(whole) else whole.snapshot(attempt)]
        whole.forget()
        return events
