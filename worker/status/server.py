"""The worker's HTTP server: /metrics for Prometheus, probes for supervisors and load balancers, / for browsers.

Metrics and probes answer any client that reaches the port. The live page shows job ids, so it is limited to
this machine unless enabled, and to requests whose Host matches.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pagemill.monitoring.live import assets
from pagemill.monitoring.live.feed import LiveFeed, TooManyWatchers
from pagemill.monitoring.metrics.metric import Encode, choose_encoding
from pagemill.worker.config import DEFAULT_HTTP_PORT

logger = logging.getLogger(__name__)

PORTS_TO_TRY = 50
NO_HEADERS: Mapping[str, str] = {}


class PortTaken(OSError):
    """An explicitly configured port is in use."""


@dataclass(frozen=True, slots=True)
class Health:
    """The response to a probe: its verdict, and details for the operator."""

    ok: bool
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """The sources of the responses. Called on the server's threads: they must not block."""

    metrics: Callable[[Encode], bytes]
    health: Callable[[], Health]
    readiness: Callable[[], Health]
    startup: Callable[[], Health]


@dataclass(frozen=True, slots=True)
class LivePage:
    """The page's feed, and the host names that it accepts in addition to this machine's own."""

    feed: LiveFeed
    host_names: Sequence[str] = ()


class StatusServer:
    """Serves probes, and the live page if enabled, on its own threads until closed."""

    def __init__(self, host: str, port: int | None, probes: Probes, page: LivePage | None = None) -> None:
        """`port` None: 9790 or the next free one.

        Raises `PortTaken` for an explicit port that is in use, `OSError` for a host of another machine.
        """
        self._server = _bind(host, port, type("Handler", (_Handler,), {"probes": probes, "page": page}))
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


def _bind(host: str, port: int | None, handler: type[_Handler]) -> ThreadingHTTPServer:
    candidates = [*range(DEFAULT_HTTP_PORT, DEFAULT_HTTP_PORT + PORTS_TO_TRY), 0] if port is None else [port]
    for candidate in candidates:
        try:
            return _Server((host, candidate), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(
                    f"port {candidate} on {host} can't be listened on: {error.strerror or error}; choose another "
                    "with --http-host and --http-port"
                ) from None
    raise PortTaken(f"port {port} on {host} is taken; choose another with --http-port, or 0 for any free one")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Leak checkers would report a probe's thread that outlives close().
    block_on_close = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an HTTP client went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    probes: Probes
    page: LivePage | None
    server_version = "pagemill"
    sys_version = ""
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        match path:
            case "/metrics":
                encode, content_type = choose_encoding(self.headers.get("Accept", ""))
                self._send(HTTPStatus.OK, content_type, self.probes.metrics(encode))
            case "/healthz":
                self._send_health(self.probes.health())
            case "/readyz":
                self._send_health(self.probes.readiness())
            case "/startupz":
                self._send_health(self.probes.startup())
            case _ if path in ("/", "/live.json") or path.startswith("/live/"):
                self._send_page(path)
            case _:
                self._refuse(HTTPStatus.NOT_FOUND, "try /metrics, /healthz, /readyz, /startupz or /")

    do_HEAD = do_GET

    def _send_page(self, path: str) -> None:
        page = self.page
        if page is None:
            self._refuse(
                HTTPStatus.FORBIDDEN,
                "the live page is for this machine only; to serve it elsewhere, start the worker with --live-page",
            )
        elif not assets.is_known_host(self.headers.get("Host"), page.host_names):
            self._refuse(
                HTTPStatus.FORBIDDEN, "unknown Host; if it is this server's, allow it with --live-page-hosts"
            )
        elif path == "/live.json":
            self._send(HTTPStatus.OK, "application/json", page.feed.document(), assets.HEADERS)
        elif path == "/live/events":
            self._send_events(page.feed)
        else:
            asset = assets.assets().get("index.html" if path == "/" else path.removeprefix("/live/"))
            if asset is None:
                self._refuse(HTTPStatus.NOT_FOUND, "no such file")
            else:
                self._send(HTTPStatus.OK, asset.content_type, asset.body, assets.HEADERS)

    def _send_events(self, feed: LiveFeed) -> None:
        """Send events until the reader disconnects or the worker stops."""
        try:
            with feed.watch() as events:
                self._send_head(HTTPStatus.OK, "text/event-stream", assets.HEADERS)
                for event in events if self.command == "GET" else ():
                    self.wfile.write(event)
        except TooManyWatchers:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")

    def _send_health(self, health: Health) -> None:
        status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps({"ok": health.ok, **health.details}).encode()
        self._send(status, "application/json", body + b"\n")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, "text/plain; charset=utf-8", reason.encode() + b"\n")

    def _send(
        self, status: HTTPStatus, content_type: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._send_head(status, content_type, {"Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, content_type: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("http: %s", format % args)
