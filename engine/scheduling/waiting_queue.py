"""Waiting requests: their order, and the sequences that enter the batch together."""

from __future__ import annotations

from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus
from pagemill.engine.scheduling.rows import RowTable
from pagemill.engine.scheduling.sequence_queue import SequenceQueue


class WaitingQueue(SequenceQueue):
    """The waiting sequences that enter independently, not those that will fork off another."""

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows

    def enqueue(self, request: Request) -> None:
        """Queue a request's waiting sequences; call it again whenever one starts waiting or ends."""
        waiting = [s for s in request.sequences if s.status is SequenceStatus.WAITING]
        for sequence in waiting:
            self.discard(sequence)
        if request.labels is not None:
            waiting = [s for s in waiting if s.can_enter]
        elif will_fork(request):
            del waiting[1:]
        for sequence in waiting:
            if sequence not in self._rows.claimed(request):
                self.add(sequence)


def siblings(sequence: Sequence) -> list[Sequence]:
    """Return the sequences that will fork off a waiting one."""
    return sequence.request.live_sequences[1:] if will_fork(sequence.request) else []


def will_fork(request: Request) -> bool:
    """Return True if several samples start out equal: all wait, and none has a known or in-flight token."""
    live = request.live_sequences
    return len(live) > 1 and all(
        s.status is SequenceStatus.WAITING
        and not (s.output_token_ids or s.num_pending_tokens or s.continuation)
        for s in live
    )
