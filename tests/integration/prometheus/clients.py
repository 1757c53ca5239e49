"""Clients of a gateway, for the test with Prometheus: they send requests, disconnect, and exceed limits."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from pagemill.producer.wire.calls.limits import QueueLimits, set_limits
from tests.producer.gateway.serving import Served
from tests.worker.harness import PATIENCE_S, QueueClient, eventually


class Clients:
    """Within the `with` statement they send requests without a pause, alternating between the kinds."""

    def __init__(self, client: QueueClient, served: Served) -> None:
        self._queue = QueueClient(client.url, client.queue)
        self._url = f"{served.base_url}/completions"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self.wait_for_the_end()

    def wait_for_the_end(self) -> None:
        """Of all jobs: a client that was notified of its deadline does not wait for its job to finish."""

        def none_left() -> bool:
            counts = self._queue.stats().counts
            return counts.get("queued", 0) + counts.get("running", 0) == 0

        eventually(none_left, "the end of every job")
        self._queue.redis.close()

    def ask(self, *, timeout: float = 60.0, hang_up: bool = False, **fields: Any) -> int:
        """The status of the response, which is read to its end unless the client disconnects before."""
        body = {"model": "echo", "prompt": "a client asks", **fields}
        headers = {"x-request-timeout": str(timeout)}
        with httpx.stream("POST", self._url, json=body, headers=headers, timeout=PATIENCE_S) as answer:
            if not hang_up:
                answer.read()
            return answer.status_code

    def break_off(self) -> None:
        """Deadlines that pass before the response, and within a stream."""
        self.ask(timeout=0.05, max_tokens=1000, ignore_eos=True)
        self.ask(timeout=2.0, max_tokens=4000, ignore_eos=True, stream=True)

    def overfill(self) -> None:
        """A queue with space for one job, which waits because the workers are paused."""
        self._queue.pause()
        self._queue.run(set_limits(self._queue.queue, QueueLimits(jobs=1)))
        try:
            (waiting,) = self._queue.submit({"prompt": "the only one"})
            assert self.ask() == 429
        finally:
            self._queue.run(set_limits(self._queue.queue, QueueLimits()))
            self._queue.pause(False)
        self._queue.wait([waiting])

    def _run(self) -> None:
        while not self._stop.is_set():
            self.ask(max_tokens=4)
            self.ask(max_tokens=4, stream=True)
            self.ask(max_tokens=2000, ignore_eos=True, stream=True, hang_up=True)
            self.ask(timeout=0.05, max_tokens=1000, ignore_eos=True)
