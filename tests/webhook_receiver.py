"""An https server that receives webhooks."""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.topologies import Certificates


@dataclass
class Receiver:
    """An https server that keeps its requests; `answers` are statuses, and the last one repeats."""

    certificates: Certificates
    answers: list[int] = field(default_factory=lambda: [204])
    headers: dict[str, str] = field(default_factory=dict)
    hang: threading.Event = field(default_factory=threading.Event)
    """Responses wait for it, up to `hang_s`."""
    hang_s: float = 20.0
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.received.append(({k.lower(): v for k, v in self.headers.items()}, body))
                receiver.hang.wait(receiver.hang_s)
                status = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                self.send_response(status)
                self.send_header("location", receiver.url)
                self.send_header("content-length", "0")
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.hang.set()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        context = self.certificates.server_context()
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server.server_address[1]}/hook?from=pagemill"

    def close(self) -> None:
        self.hang.set()
        self.server.shutdown()
        self.server.server_close()
