"""The ports of a fleet, chosen once: a restarted child keeps its port."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pagemill.supervisor.settings import SettingsError, UpSettings
from pagemill.worker.config import DEFAULT_HTTP_PORT

BACKLOG = 2048
PORTS_TO_TRY = 1000


@dataclass(frozen=True, slots=True)
class Ports:
    workers: tuple[int, ...]
    exporter: int | None
    gateway: socket.socket | None
    """Listening: while the gateway is restarted, clients wait in its backlog and are not rejected."""

    @classmethod
    def choose(cls, settings: UpSettings, workers: int) -> Ports:
        """Raises SettingsError for a port in use."""
        gateway = _listen(settings) if settings.gateway is not False else None
        try:
            taken = {int(gateway.getsockname()[1])} if gateway is not None else set()
            exporter = _exporter_port(settings, taken) if settings.exporter is not False else None
            taken |= {exporter} if exporter is not None else set()
            return cls(_worker_ports(settings, workers, taken), exporter, gateway)
        except SettingsError:
            if gateway is not None:
                gateway.close()
            raise


def _exporter_port(settings: UpSettings, taken: set[int]) -> int:
    host = settings.http_host
    port = settings.exporter_port or _any_free(host, taken)
    if port in taken or not is_free(host, port):
        raise SettingsError(f"exporter_port: {port} on {host} is taken; choose another, or 0 for any")
    return port


def _worker_ports(settings: UpSettings, workers: int, taken: set[int]) -> tuple[int, ...]:
    host, first = settings.http_host, settings.http_port
    if first == 0:
        chosen: list[int] = []
        for _ in range(workers):
            chosen.append(_any_free(host, taken | set(chosen)))
        return tuple(chosen)
    if first is None:
        candidates = range(DEFAULT_HTTP_PORT, DEFAULT_HTTP_PORT + PORTS_TO_TRY)
        free = [port for port in candidates if port not in taken and is_free(host, port)]
        return tuple(free[:workers])
    wanted = range(first, first + workers)
    for port in wanted:
        if port > 65535 or port in taken or not is_free(host, port):
            raise SettingsError(
                f"http_port: {workers} workers take {first} to {first + workers - 1} on {host}, and {port} is "
                "not free; choose another, or 0 for any"
            )
    return tuple(wanted)


def is_free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _any_free(host: str, taken: set[int]) -> int:
    while True:
        with socket.socket(_family(host)) as probe:
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise SettingsError(
                    f"http_host: {host} can't be listened on: {error.strerror or error}"
                ) from error
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def _listen(settings: UpSettings) -> socket.socket:
    host, port = settings.gateway_host, settings.gateway_port
    listener = socket.socket(_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise SettingsError(
            f"gateway_port: {host}:{port} can't be listened on: {reason}; choose another"
        ) from error
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
