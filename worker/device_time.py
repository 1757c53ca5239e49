"""Division of the time of steps among the requests that the engine holds."""

from __future__ import annotations


class DeviceTime:
    """Gives each request an equal share of every step between its start and its end.

    The shares of all requests sum to the time of all steps in which there was a request. One running sum of shares is
    kept, so a step costs the same for one request as for a thousand (virtual time, as in fair queueing: Parekh and
    Gallager, 1993).
    """

    def __init__(self) -> None:
        self._share = 0.0
        """The seconds of a request that was there from the beginning."""
        self._began: dict[str, float] = {}

    def begin(self, request_id: str) -> None:
        self._began[request_id] = self._share

    def add(self, seconds: float) -> None:
        """Divide the time of a step."""
        if self._began:
            self._share += seconds / len(self._began)

    def end(self, request_id: str) -> float:
        """Return the request's seconds; 0 for one that never began."""
        return self._share - self._began.pop(request_id, self._share)
