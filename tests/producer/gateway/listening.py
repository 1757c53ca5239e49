"""A client that listens to a stream on a separate thread, while the test changes the stream's job."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.producer.gateway.serving import Served
from tests.worker.harness import PATIENCE_S


class Listener:
    """The messages one client has received so far; all of them once `wait` has returned."""

    def __init__(self, served: Served, fields: dict[str, Any]) -> None:
        self.status = 0
        self.text = ""
        self.error: dict[str, Any] = {}
        self.is_done = False
        """The stream sent its final event."""
        self.is_cut = False
        """The connection ended in the middle of the response."""
        self._url = f"{served.base_url}/completions"
        self._ask = {"prompt": "x", "stream": True} | fields
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until the response has ended."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"the stream does not end, after {self.text!r}"

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._ask, timeout=2 * PATIENCE_S) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.TransportError:
            self.is_cut = True

    def _take(self, line: str) -> None:
        event = line.removeprefix("data: ")
        if event == "[DONE]":
            self.is_done = True
        elif event.startswith("{"):
            body = json.loads(event)
            self.error = body.get("error", {})
            self.text += "".join(choice.get("text", "") for choice in body.get("choices", ()))


@contextmanager
def listening(served: Served, **fields: Any) -> Iterator[Listener]:
    """A client that listens; at the end it has received everything."""
    listener = Listener(served, fields)
    listener.start()
    yield listener
    listener.wait()
