"""The servers next to the measuring process, and the CPU time of each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import redis

from benchmarks.engines import peers
from benchmarks.engines.process import processor_seconds

QUEUE = "gateway-benchmark"
START_LIMIT_S = 900.0
KV_BYTES = 1 << 30
VLLM_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Server:
    """An HTTP server that streams completions."""

    name: str
    port: int
    process: psutil.Process
    sleeps: bool = False
    """The process and its children are stopped while others are measured: vLLM spins while it is idle."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        if not self.sleeps:
            yield
            return
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Processors:
    """Reads the CPU seconds of each part by name; `client` is this process."""

    processes: dict[str, psutil.Process]
    redis_url: str | None = None

    def read(self) -> dict[str, float]:
        seconds = {name: processor_seconds(process) for name, process in self.processes.items()}
        if self.redis_url is not None:
            with redis.Redis.from_url(self.redis_url) as client:
                used = client.info("cpu")
            seconds["redis"] = float(used["used_cpu_user"]) + float(used["used_cpu_sys"])
        return seconds | {"client": time.process_time()}


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # remaining child processes
        process.wait()


def pagemill(
    arguments: Sequence[str], url: str, log: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    code = "from pagemill.__main__ import main; main()"
    command = [sys.executable, "-c", code, *arguments, "--redis-url", url, "--queue", QUEUE]
    return running(command, dict(os.environ), log)


@contextlib.contextmanager
def vllm(model: str, served: str, log: Path) -> Iterator[Server]:
    """vLLM's server, ready and stopped. Raises SystemExit without its environment, or if it does not start."""
    python = peers.VLLM.python()
    if python is None:
        raise SystemExit("vLLM has no environment here: python -m benchmarks --install-peers")
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", served,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", VLLM_DTYPE, "--max-model-len", "2048",
        "--disable-uvicorn-access-log",  # the gateway does not write one either
    ]  # fmt: skip
    with running(command, peers.process_environment(KV_BYTES), log) as process:
        until_ready(port, served, [(process, log)])
        os.killpg(process.pid, signal.SIGSTOP)
        yield Server("vLLM", port, psutil.Process(process.pid), sleeps=True)


def until_ready(port: int, model: str, needed: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> None:
    """Wait until the server lists the model. `needed`: the required processes, with their logs."""
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up:
        for process, log in needed:
            if process.poll() is not None:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise SystemExit(f"{log.stem} ended with {process.returncode}:\n{last}")
        with contextlib.suppress(httpx.HTTPError):
            found = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            if found.status_code == 200 and model in [row["id"] for row in found.json()["data"]]:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server on port {port} did not serve {model} within {START_LIMIT_S:.0f} s")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
