"""Requests for label probabilities: their chains fork off each other, and finish together."""

from __future__ import annotations

from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus
from pagemill.engine.scheduling.waiting_queue import WaitingQueue


class Labelling:
    """Admits chains once their parents have computed the shared tokens, and finds those that can finish.

    A complete chain keeps its blocks until the chains that fork off it have entered. If rows or blocks run short, it
    is removed earlier: those chains then reuse the full blocks of the prefix cache, or compute them again.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._requests: dict[Request, None] = {}
        """Requests with several chains, the first of which has entered."""

    def entered(self, sequence: Sequence) -> None:
        """Note that a sequence has entered the batch."""
        if sequence.request.labels is not None and len(sequence.request.sequences) > 1:
            self._requests[sequence.request] = None

    def forget(self, request: Request) -> None:
        self._requests.pop(request, None)

    def enqueue(self) -> None:
        """Queue the chains that can enter. Call it between two steps."""
        for request in self._requests:
            self._waiting.enqueue(request)

    def idle(self, *, keeps_parents: bool) -> list[Sequence]:
        """Return the complete chains; `keeps_parents` excludes those from which others have yet to fork."""
        found = []
        for request in self._requests:
            waiting = {s.fork_of for s in request.sequences if s.status is SequenceStatus.WAITING}
            parents = waiting if keeps_parents else set()
            found += [
                sequence
                for sequence in request.live_sequences
                if sequence.scoring is not None and sequence.scoring.is_complete and sequence not in parents
            ]
        return found
