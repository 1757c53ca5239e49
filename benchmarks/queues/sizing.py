"""A plan beside a real run: what `pagemill doctor --plan` says of a model on this CPU, and what a worker then does.

    python -m benchmarks.queues.sizing                        # smollm2, 200 jobs
    python -m benchmarks.queues.sizing --jobs 60 --output-tokens 32

One thread, and processor time on both sides: the plan is made of the CPU's speed in processor time, measured before and
after the run while the worker waits, and the worker's jobs are counted per second of its processor time. So neighbours
on a shared machine take memory bandwidth and caches from it, but not the clock. Lengths of prompts and outputs, in
tokens and bytes, are the run's own averages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import redis
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import start_server
from benchmarks.report import RESULTS
from pagemill import Producer
from pagemill.cli.app import ask
from pagemill.cli.local_worker import LocalWorker
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu_speed import CpuSpeed, measure_cpu
from pagemill.producer.wire.calls import registry
from pagemill.sizing.answer import Answer, Question, answer
from pagemill.sizing.redis_cost import scripts_per_job

WORDS = (
    "river",
    "stone",
    "paper",
    "light",
    "green",
    "seven",
    "market",
    "winter",
    "garden",
    "letter",
    "window",
    "music",
)
QUEUE = "sizing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    prompt_tokens: float
    output_tokens: float
    prompt_bytes: float
    output_bytes: float
    kv_blocks: int
    jobs_per_s: float
    """By the clock."""
    jobs_per_cpu_s: float
    waiting_bytes: float
    ended_bytes: float
    scripts_per_job: float
    server_cores: float


def run(
    model: str, jobs: int, prompt_words: int, output_tokens: int
) -> tuple[Measured, list[CpuSpeed], list[float]]:
    """Run jobs that all wait at once, with rows always taken until the last ones."""
    rows = [
        {
            "model": model,
            "prompt": " ".join(random.Random(number).choices(WORDS, k=prompt_words)),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        for number in range(jobs)
    ]
    with (
        tempfile.TemporaryDirectory() as directory,
        start_server("valkey", Path(directory)) as url,
        redis.Redis.from_url(url) as client,
        Producer(url, queue=QUEUE) as producer,
        LocalWorker(
            model, queue=QUEUE, url=url, options=["--http-port", "0", "--num-threads", "1"]
        ) as worker,
    ):
        _, info = worker.wait_ready()
        for row in rows[:2]:
            producer.submit(row | {"max_tokens": 4}).result(
                timeout=600
            )  # scripts are loaded, kernels compiled
        process = psutil.Process(info.pid)
        torch.set_num_threads(1)
        speeds, loads = [measure_cpu(time.process_time)], [os.getloadavg()[0]]
        before = _server(client)
        ask(url, registry.set_paused(QUEUE, True))
        batch = producer.submit_many(rows)
        waiting = (_server(client)["memory"] - before["memory"]) / jobs
        began, start, spent = time.perf_counter(), _server(client), _cpu_s(process)
        ask(url, registry.set_paused(QUEUE, False))
        results = [result.result for result in batch.results(timeout=3600)]
        took = time.perf_counter() - began
        end, spent = _server(client), _cpu_s(process) - spent
        speeds.append(measure_cpu(time.process_time))
        loads.append(os.getloadavg()[0])
        blocks = _kv_blocks(str(info.url))
    ended = [result for result in results if result is not None]
    return (
        Measured(
            prompt_tokens=statistics.mean(one.usage.prompt_tokens for one in ended),
            output_tokens=statistics.mean(one.usage.completion_tokens for one in ended),
            prompt_bytes=statistics.mean(len(str(row["prompt"])) for row in rows),
            output_bytes=statistics.mean(len(one.text.encode()) for one in ended),
            kv_blocks=blocks,
            jobs_per_s=jobs / took,
            jobs_per_cpu_s=jobs / spent,
            waiting_bytes=waiting,
            ended_bytes=(end["memory"] - before["memory"]) / jobs,
            scripts_per_job=(end["scripts"] - start["scripts"]) / jobs,
            server_cores=(end["cpu_s"] - start["cpu_s"]) / took,
        ),
        speeds,
        loads,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _server(client: redis.Redis) -> dict[str, float]:
    cpu = client.info("cpu")
    scripts = client.info("commandstats").get("cmdstat_evalsha", {})
    return {
        # Key by key: with few jobs, what the server has for itself is more.
        "memory": sum(
            client.memory_usage(key, samples=0) or 0
            for key in client.scan_iter(f"pagemill:{{{QUEUE}}}:*", 1000)
        ),
        "scripts": scripts.get("calls", 0),
        "cpu_s": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
    }


def _kv_blocks(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = re.search(r"^pagemill_kv_cache_capacity_blocks\S* (\S+)$", text, re.MULTILINE)
    assert found is not None, "the worker does not tell its blocks"
    return int(float(found[1]))


def predict(model: str, measured: Measured, speeds: list[CpuSpeed], jobs: int) -> Answer:
    output = round(measured.output_tokens)
    prompt = round(measured.prompt_tokens)
    return answer(
        Question(
            config=EngineConfig(model=model),
            device="cpu",
            prompt_tokens=prompt,
            output_tokens=output,
            rows=jobs,
            deadline_s=jobs / measured.jobs_per_cpu_s,
            bytes_per_token=(measured.prompt_bytes + measured.output_bytes) / (prompt + output),
            cpu_bytes_per_s=statistics.mean(speed.bytes_per_s for speed in speeds),
            cpu_flops=statistics.mean(speed.flops for speed in speeds),
        )
    )


def compared(measured: Measured, planned: Answer) -> dict[str, tuple[float, float]]:
    """Figures by name: planned, measured."""
    plan = planned.plan
    service_s = plan.rows / measured.jobs_per_s
    return {
        "KV blocks": (plan.kv_blocks, measured.kv_blocks),
        "jobs per second of one processor": (plan.jobs_per_s, measured.jobs_per_cpu_s),
        "bytes of a waiting job": (plan.bytes.waiting, measured.waiting_bytes),
        "bytes of an ended job": (plan.bytes.ended, measured.ended_bytes),
        "scripts per job": (
            scripts_per_job(service_s, round(measured.output_tokens), plan.rows),
            measured.scripts_per_job,
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.sizing", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    started, where = datetime.now(UTC), machine.describe()
    measured, speeds, loads = run(given.model, given.jobs, given.prompt_words, given.output_tokens)
    planned = predict(given.model, measured, speeds, given.jobs)
    pairs = compared(measured, planned)
    table = Table(title=f"{given.model} on this CPU, load {loads[0]:.1f} before and {loads[1]:.1f} after")
    for name in ("", "planned", "measured", "measured / planned"):
        table.add_column(name, justify="right")
    for name, (plan, real) in pairs.items():
        table.add_row(name, f"{plan:,.2f}", f"{real:,.2f}", f"{real / plan:.2f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    path = given.out or RESULTS / f"sizing-{started:%Y%m%dT%H%M%SZ}.json"
    report = {
        "question": "what a plan says, and what a worker then does",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "load_average": loads,
        "cpu": [asdict(speed) for speed in speeds],
        "measured": asdict(measured),
        "planned": planned.document(),
        "compared": {name: {"planned": plan, "measured": real} for name, (plan, real) in pairs.items()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
