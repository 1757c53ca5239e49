"""Division of the time of steps among the engine's requests."""

from __future__ import annotations


class DeviceTime:
    """Gives each request an equal share of every step between its start and its end.

    The shares add up to the time of all steps with requests. One running sum of shares is kept, so the cost of a step
    does not depend on the number of requests (virtual time, as in fair queueing: Parekh and Gallager, 1993).
    """

    def __init__(self) -> None:
        self._share = 0.0
        """Seconds of a request that has existed since the first step."""
        self._began: dict[str, float] = {}

    def begin(self, request_id: str) -> None:
        self._began[request_id] = self._share

    def add(self, seconds: float) -> None:
        """Divide the time of a step."""
        if self._began:
            self._share += seconds / len(self._began)

    def end(self, request_id: str) -> float:
        """Return the request's seconds; 0 for one that never started."""
        return self._share - self._began.pop(request_id, self._share)
