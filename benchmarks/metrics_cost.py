"""The cost of metrics: the time in which an engine counts, takes snapshots and is scraped, per step.

`python -m benchmarks.metrics_cost`. One engine decodes a full batch as a worker's thread would drive it: a snapshot
every tenth of a second, a scrape every `--scrape-s` seconds. Everything that is done for metrics alone is timed where
it happens, and set beside the time of the steps. Scrapes run on another thread in a worker; here their whole time is
charged to the steps, which is the worst that they can cost. The goal is 1 % of a step, and of a 10 ms step too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import RESULTS, model_directory
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.sampling_params import SamplingParams
from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.exporter import WorkerMetrics
from pagemill.worker.engine_host.loop import STATS_INTERVAL_S

GOAL = 0.01
SHORT_STEP_S = 0.010
"""A decode step on a GPU."""

T = TypeVar("T")


@dataclass(slots=True)
class Part:
    """One thing that is done for metrics alone."""

    name: str
    calls: int = 0
    seconds: float = 0.0

    def timed(self, function: Callable[..., T]) -> Callable[..., T]:
        def run(*args: Any, **kwargs: Any) -> T:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return run


@dataclass(slots=True)
class Cost:
    steps: int
    step_seconds: float
    """Of all steps, what is done for metrics included."""
    parts: list[Part]

    @property
    def per_step(self) -> float:
        return sum(part.seconds for part in self.parts) / self.steps

    @property
    def share(self) -> float:
        total = sum(part.seconds for part in self.parts)
        return total / (self.step_seconds + total)


def measure(engine: Engine, num_sequences: int, num_tokens: int, *, scrape_s: float) -> Cost:
    """Decode `num_tokens` tokens of `num_sequences` sequences side by side.

    Snapshots and scrapes come as often as in a worker, in the time that the steps take.
    """
    recorded, states = Part("recording a step"), Part("counting the blocks of a step")
    snapshots, scrapes = Part("snapshots"), Part(f"scrapes, every {scrape_s:g} s")
    recorder, scheduler = engine._recorder, engine._scheduler
    recorder.planned = recorded.timed(recorder.planned)  # type: ignore[method-assign]
    recorder.collected = recorded.timed(recorder.collected)  # type: ignore[method-assign]
    scheduler.kv_cache.stats = states.timed(scheduler.kv_cache.stats)  # type: ignore[method-assign]
    snapshot = snapshots.timed(engine.stats)
    metrics = WorkerMetrics(WorkerCounters(), lambda: stats, lambda: None)
    render = scrapes.timed(metrics.render)

    params = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens)
    for i in range(num_sequences):
        prompt = [3 + (i * 31 + j * 7) % 200 for j in range(32)]
        engine.add_request(f"row-{i}", prompt, params)
    stats, began = engine.stats(), time.perf_counter()
    steps, busy, stats_at, scraped_at = 0, 0.0, began, began - scrape_s
    while engine.has_unfinished():
        step_began = time.perf_counter()
        engine.step()
        now = time.perf_counter()
        steps, busy = steps + 1, busy + now - step_began
        if now - stats_at >= STATS_INTERVAL_S:
            stats, stats_at = snapshot(), now
        if now - scraped_at >= scrape_s:
            render()
            scraped_at = now
    in_steps = recorded.seconds + states.seconds
    return Cost(steps, busy - in_steps, [recorded, states, snapshots, scrapes])


def table(cost: Cost, *, title: str) -> Table:
    view = Table(title=title)
    for column in ("part", "calls", "us a call", "us a step"):
        view.add_column(column, justify="left" if column == "part" else "right")
    for part in cost.parts:
        per_call = part.seconds / max(part.calls, 1)
        view.add_row(
            part.name, str(part.calls), f"{per_call * 1e6:.1f}", f"{part.seconds / cost.steps * 1e6:.2f}"
        )
    view.add_row("all", "", "", f"{cost.per_step * 1e6:.2f}")
    return view


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics_cost", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, smollm2 or echo:MS")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--scrape-s", type=float, default=15.0, help="as in our configuration of Prometheus")
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args(arguments)
    if machine.is_busy():
        print("this machine is busy: steps and metrics are both slower than they are", file=sys.stderr)
    model = given.model if given.model.startswith("echo") else str(model_directory(given.model))
    engine = Engine.from_config(EngineConfig(model=model, max_num_seqs=given.sequences))
    started, where = datetime.now(UTC), machine.describe()
    cost = measure(engine, given.sequences, given.tokens, scrape_s=given.scrape_s)
    step_s = cost.step_seconds / cost.steps
    results = {
        "question": "time per engine step that is spent on metrics alone",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "model": given.model,
        "settings": {"sequences": given.sequences, "tokens": given.tokens, "scrape_s": given.scrape_s},
        "steps": cost.steps,
        "step_ms": round(step_s * 1e3, 3),
        "metrics_us_per_step": round(cost.per_step * 1e6, 2),
        "share": round(cost.share, 6),
        "parts": {part.name: {"calls": part.calls, "seconds": round(part.seconds, 6)} for part in cost.parts},
    }
    path = given.out or RESULTS / f"metrics-cost-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(cost, title=f"Metrics, {cost.steps} steps of {step_s * 1e3:.1f} ms"))
    in_short = cost.per_step / SHORT_STEP_S
    console.print(f"{cost.share:.3%} of these steps (goal: {GOAL:.0%}); {in_short:.2%} of a step of 10 ms")
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
