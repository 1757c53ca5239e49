"""The worker's HTTP server: /metrics for Prometheus, /healthz and /readyz for whoever restarts and routes."""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from worker.config import DEFAULT_HTTP_PORT

logger = logging.getLogger(__name__)

PORTS_TO_TRY = 50
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PortTaken(OSError):
    """The port that was asked for belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class Health:
    """An answer to a probe: whether it is good, and what an operator wants to know beside it."""

    ok: bool
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Where the answers come from. Called on the server's threads: they must not block."""

    metrics: Callable[[], bytes]
    health: Callable[[], Health]
    readiness: Callable[[], Health]


class StatusServer:
    """Serves probes on its own threads until closed."""

    def __init__(self, host: str, port: int | None, probes: Probes) -> None:
        """`port` None: 9790 or the next free one.

        Raises `PortTaken` for an explicit port that is taken, `OSError` for a host that is not ours.
        """
        self._server = _bind(host, port, probes)
        self._thread = threading.Thread(target=self._serve, name="pagemill-http", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.1)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _bind(host: str, port: int | None, probes: Probes) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"probes": probes})
    if port is not None:
        try:
            return _Server((host, port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = (
                    f"port {port} on {host} is taken; choose another with --http-port, or 0 for any free one"
                )
                raise PortTaken(error.errno, message) from None
            raise
    for candidate in range(DEFAULT_HTTP_PORT, DEFAULT_HTTP_PORT + PORTS_TO_TRY):
        try:
            return _Server((host, candidate), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _Server((host, 0), handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A probe's thread that outlives close() would be reported as a leak by whoever watches sockets.
    block_on_close = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an HTTP client went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    probes: Probes
    server_version = "pagemill"
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, METRICS_CONTENT_TYPE, self.probes.metrics())
        elif path == "/healthz":
            self._send_health(self.probes.health())
        elif path == "/readyz":
            self._send_health(self.probes.readiness())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"try /metrics, /healthz or /readyz\n")

    def _send_health(self, health: Health) -> None:
        status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps({"ok": health.ok, **health.details}).encode()
        self._send(status, "application/json", body + b"\n")

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("http: %s", format % args)
