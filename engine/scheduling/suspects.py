"""Requests in a failed step that have not yet succeeded in a separate step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagemill.engine.scheduling.request import Request
from pagemill.engine.scheduling.sequence_queue import scheduling_key
from pagemill.engine.scheduling.step_builder import InFlightStep


class Suspects:
    def __init__(self) -> None:
        self._requests: set[Request] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate in scheduling order."""
        return iter(sorted(self._requests, key=lambda request: scheduling_key(request.sequences[0])))

    def add(self, requests: Iterable[Request]) -> None:
        """Mark the unfinished requests of a failed step as suspects."""
        for request in requests:
            if not request.is_finished:
                request.num_step_failures += 1
                self._requests.add(request)

    def discard(self, request: Request) -> None:
        self._requests.discard(request)

    def clear(self, step: InFlightStep) -> None:
        """Clear a suspect that sampled in a separate step and has caught up: it did not cause the failure."""
        if not self._requests or not step.sampled:
            return
        requests = step.requests()
        for request in self._requests.intersection(requests):
            live = request.live_sequences
            if len(requests) == 1 and all(s.num_computed_tokens >= s.num_known_tokens - 1 for s in live):
                self._requests.discard(request)
