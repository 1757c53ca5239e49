"""An endpoint in a separate process that echoes prompts, as the echo model does; to be killed and frozen.

`python -m tests.chaos.echo_endpoint PORT VERSION` serves it. It does not know the boundary between a prompt
and the text of a resumed job: that follows from max_tokens, which in these tests is the length of the prompt.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.conftest import ROOT
from tests.worker.engine_host.endpoint.stub import Handler, Stub, serving
from tests.worker.harness import eventually

TOKENS = 4
"""Tokens per event: bytes, as in the echo model."""
DELAY_S = 0.02


class EchoHandler(Handler):
    def _events(self, body: dict[str, Any], fault: str) -> Iterator[dict[str, Any]]:
        given, most = body["prompt"], body["max_tokens"]
        prompt = given[: (len(given) + most) // 2]
        rest = prompt[-most:]
        for start in range(0, len(rest), TOKENS):
            text = rest[start : start + TOKENS]
            choice = self._choice(text, None) | {"token_ids": list(text.encode())}
            yield {"model": self.stub.model, "choices": [choice]}
        yield {"model": self.stub.model, "choices": [self._choice("", "length")]}
        yield {"choices": [], "usage": {"prompt_tokens": len(given), "completion_tokens": len(rest)}}


class EchoEndpoint:
    """The process, and its address, which stays. A context manager."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, version: str = "1.0") -> None:
        command = [sys.executable, "-m", __name__, str(self._port), version]
        self._process = subprocess.Popen(command, cwd=ROOT)
        eventually(self._answers, "the endpoint to answer")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=5):
                return True
        except OSError:
            return False

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def __enter__(self) -> EchoEndpoint:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    echo = Stub()
    echo.delay_s, echo.version = DELAY_S, sys.argv[2]
    with serving(echo, int(sys.argv[1]), EchoHandler):
        threading.Event().wait()
