"""The process around the application: sockets, signals, resource limits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import threading
from collections.abc import Generator

import uvicorn

from pagemill.producer.gateway.app import build_app
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.guard.connection import ConnectionLimits
from pagemill.producer.gateway.guard.limits import MAX_HEAD_BYTES
from pagemill.producer.gateway.metrics import GatewayMetrics
from pagemill.producer.wire.process.stop_signals import stop_signals

logger = logging.getLogger(__name__)

BACKLOG = 2048
TELL_S = 2.0
"""Interval between the log lines of a drain."""
KEEP_ALIVE_S = 30
_OTHER_FILES = 256
"""File descriptors reserved for purposes other than client connections."""


def build_server(config: GatewayConfig) -> uvicorn.Server:
    """Return a server that `run()` starts and SIGTERM drains. Raises KeyFileError."""
    metrics = GatewayMetrics()
    limits = ConnectionLimits(
        min(config.max_connections, _raise_file_limit() - _OTHER_FILES), config.head_timeout_s, metrics
    )
    settings = uvicorn.Config(
        build_app(config, metrics),
        host=config.host,
        port=config.port,
        http=limits.protocol(),
        ws="none",
        loop="auto",
        interface="asgi3",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.drain_s,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
        lifespan="on",
    )
    return _Server(settings, metrics)


class _Server(uvicorn.Server):
    """Exits like a worker: a drain after a signal counts as success, not as being killed by the signal."""

    def __init__(self, config: uvicorn.Config, metrics: GatewayMetrics) -> None:
        super().__init__(config)
        self._metrics = metrics

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and log the progress."""
        telling = asyncio.create_task(self._report(), name="pagemill-drain")
        try:
            await super().shutdown(sockets)
        finally:
            telling.cancel()

    async def _report(self) -> None:
        wait_s = self.config.timeout_graceful_shutdown
        while True:
            under_way = self._metrics.in_flight
            if under_way:
                logger.info(
                    "stopping: requests in progress: %d; they have %s s from the start", under_way, wait_s
                )
            await asyncio.sleep(TELL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals():
            # uvicorn handles SIGTERM and SIGINT itself, but SIGHUP would end the process.
            more = set(stop_signals()) - {signal.SIGTERM, signal.SIGINT}
            before = {number: signal.signal(number, self.handle_exit) for number in more if _is_main_thread()}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                self._captured_signals.clear()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def bind(config: GatewayConfig) -> socket.socket:
    """Return the listening socket, for `Server.run`. Raises OSError for a port that is in use."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on a socket created with IPPROTO_TCP. Otherwise the end of each small response waits
    # 40 ms for the client to acknowledge its start.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except BaseException:
        listener.close()
        raise
    return listener


def inherit(fd: int) -> socket.socket:
    """Return the listening socket that a supervisor has left open. Raises OSError for anything else."""
    listener = socket.socket(fileno=fd)
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError(errno.EINVAL, "no process listens on it")
    return listener


def _raise_file_limit() -> int:
    """Raise the limit of open files, up to 65,536. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
