"""Gateways for the tests: on a thread of this process, and as separate processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pagemill.producer.gateway.api_keys import ApiKey, new_key
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.server import bind, build_server
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config


@dataclass(frozen=True)
class Served:
    """A gateway that serves requests."""

    url: str
    port: int

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def ask(self, raw: bytes) -> bytes:
        """Return the response to raw bytes, until the gateway closes."""
        with self.connect() as connection:
            connection.sendall(raw)
            return read_all(connection)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text

    def wait_for(self, *models: str) -> None:
        """Wait until workers of these models have been announced to the gateway."""

        def listed() -> set[str]:
            answer = httpx.get(f"{self.base_url}/models", timeout=PATIENCE_S).json()
            return {model["id"] for model in answer["data"]}

        eventually(lambda: set(models) <= listed(), f"the models {', '.join(models)}")

    def is_alive(self) -> bool:
        return httpx.get(f"{self.url}/readyz", timeout=PATIENCE_S).status_code == 200


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


@contextmanager
def gateway(url: str, queue: str, **settings: Any) -> Iterator[Served]:
    """A gateway on a thread of this process, with its own port."""
    config = GatewayConfig(
        redis_url=url,
        queue=queue,
        port=0,
        **{"batch_poll_s": 0.1, "batch_lease_s": 2.0, "drain_s": 1} | settings,
    )
    server = build_server(config)
    with bind(config) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="gateway")
        thread.start()
        try:
            eventually(lambda: server.started, "the gateway's start")
            port = listener.getsockname()[1]
            yield Served(f"http://127.0.0.1:{port}", port)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def served_worker(url: str, *, load_patience_s: float = PATIENCE_S, **settings: Any) -> Iterator[Served]:
    """A worker with these settings, and a gateway that knows it, on a separate queue."""
    queue = f"q-{uuid.uuid4().hex[:12]}"
    config = worker_config(url, queue, **settings)
    with running_worker(config, load_patience_s) as worker, gateway(url, queue) as served:
        served.wait_for(worker.model)
        yield served


_RUN = """
import json, sys
from pathlib import Path
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.server import bind, build_server
settings = json.loads(sys.argv[1])
config = GatewayConfig(**settings)
server = build_server(config)
listener = bind(config)
print(listener.getsockname()[1], flush=True)
server.run(sockets=[listener])
"""


@contextmanager
def gateway_process(
    url: str, queue: str, *, log: Path | None = None, **settings: Any
) -> Iterator[tuple[Served, subprocess.Popen[str]]]:
    """A gateway in a process, to be killed. Its output goes to `log`."""
    config = {
        "redis_url": url, "queue": queue, "port": 0, "batch_poll_s": 0.1, "batch_lease_s": 2.0,
    } | settings  # fmt: skip
    with (log or Path(os.devnull)).open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=errors if log else None,
            text=True,
        )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        served = Served(f"http://127.0.0.1:{port}", port)
        eventually(lambda: _answers(served), "the gateway's answer")
        yield served, process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()


def _answers(served: Served) -> bool:
    try:
        return served.is_alive()
    except httpx.TransportError:
        return False


def write_keys(path: Path, **entries: dict[str, Any]) -> dict[str, str]:
    """A file of keys, by name; returns the keys."""
    made = {name: new_key() for name in entries}
    rows = [
        ApiKey(name=name, sha256=made[name][1], **fields).model_dump(mode="json", exclude_defaults=True)
        for name, fields in entries.items()
    ]
    path.write_text(json.dumps({"keys": rows}))
    return {name: key for name, (key, _) in made.items()}
