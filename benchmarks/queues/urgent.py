"""How long a job of high priority waits for its first token at a worker whose rows are full of bulk, and what it costs.

One worker with a real model, and three passes over the same bulk jobs of low priority: alone; with a chat of normal
priority every few seconds; and with one of high priority, which takes a row. Beside them the same chats at the idle
worker. The cost is the bulk's and the chats' tokens per second, compared with the bulk's alone.

    python -m benchmarks.queues.urgent
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.report import result_path, write
from pagemill import Producer
from pagemill.cli.local_worker import LocalWorker

QUEUE = "benchmark"
CHAT_TOKENS = 16
BULK_TOKENS = 160
EVERY_S = (0.3, 1.7)
"""Between two chats, at random: bulk rows of one length become free together."""


def chat(producer: Producer, model: str, number: int, priority: str) -> float:
    """Ask for a short answer; returns the seconds to its first token."""
    began = time.perf_counter()
    job = producer.submit(
        prompt=f"Question {number}: why is the sky blue?", model=model, max_tokens=CHAT_TOKENS, ignore_eos=True,
        priority=priority, stream=True, temperature=0.0,
    )  # fmt: skip
    first = 0.0
    for event in job.stream():
        if not first and event.token_ids:
            first = time.perf_counter() - began
    return first


@contextmanager
def chats(producer: Producer, model: str, priority: str | None) -> Iterator[list[float]]:
    """Chat every few seconds while the block runs; collects the times to first tokens."""
    stop, times = threading.Event(), list[float]()

    def run() -> None:
        rng = random.Random(1)
        while priority is not None and not stop.wait(rng.uniform(*EVERY_S)):
            times.append(chat(producer, model, len(times), priority))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


def bulk(producer: Producer, model: str, count: int, priority: str | None) -> dict[str, Any]:
    """Run the bulk jobs, with chats of this priority beside them."""
    began = time.perf_counter()
    batch = producer.submit_many(
        {
            "prompt": f"Row {number} of the table, in other words: ", "model": model, "max_tokens": BULK_TOKENS,
            "ignore_eos": True, "temperature": 0.0, "priority": "low",
        }
        for number in range(count)
    )  # fmt: skip
    with chats(producer, model, priority) as times:
        ends = [item.state for item in batch.results()]
        seconds = time.perf_counter() - began
    assert ends == ["succeeded"] * count
    tokens = count * BULK_TOKENS + len(times) * CHAT_TOKENS
    return {"first_token_s": [round(t, 4) for t in times], "tokens_per_second": round(tokens / seconds, 2)}


def passes(producer: Producer, model: str, count: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    measured: dict[str, list[dict[str, Any]]] = {"idle": [], "alone": [], "normal": [], "high": []}
    for _ in range(rounds):
        times = [chat(producer, model, number, "high") for number in range(5)]
        measured["idle"].append({"first_token_s": [round(t, 4) for t in times]})
        for name, priority in (("alone", None), ("normal", "normal"), ("high", "high")):
            measured[name].append(bulk(producer, model, count, priority))
    return measured


def summary(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    times = {
        name: [t for one in measured[name] for t in one["first_token_s"]]
        for name in ("idle", "normal", "high")
    }

    shares = [
        high["tokens_per_second"] / alone["tokens_per_second"]
        for high, alone in zip(measured["high"], measured["alone"], strict=True)
    ]
    return {
        "median_first_token_s": {name: round(statistics.median(all_), 4) for name, all_ in times.items()},
        "slowest_first_token_s": {name: max(all_) for name, all_ in times.items()},
        "throughput_with_high_beside_alone": [round(share, 4) for share in shares],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8, help="sequences in a step")
    parser.add_argument("--jobs", type=int, default=48, help="bulk jobs in a pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    given = parser.parse_args()
    at = datetime.now(UTC)
    figures: dict[str, Any] = {
        "date": at.isoformat(timespec="seconds"), "machine": machine.describe(), "model": given.model,
        "max_num_seqs": given.rows, "bulk_jobs": given.jobs,
    }  # fmt: skip
    options = ["--max-num-seqs", str(given.rows), "--http-port", "0"]
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-benchmark-") as state,
        LocalWorker(given.model, queue=QUEUE, state_dir=Path(state), options=options) as worker,
    ):
        url, info = worker.wait_ready()
        with Producer(url, queue=QUEUE) as producer:
            bulk(producer, info.models[0], given.rows, None)  # warm up
            figures["passes"] = passes(producer, info.models[0], given.jobs, given.rounds)
    figures |= summary(figures["passes"])
    path = given.out or result_path("urgent", at)
    write(path, figures)
    print(json.dumps(summary(figures["passes"]), indent=2))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
