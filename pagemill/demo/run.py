"""`make demo`: a real labeling job, end to end, on this machine.

A worker process brings its own Valkey server and loads the packaged model; a producer submits rows of product
reviews with `structured_outputs={"choice": [...]}` and collects the labels. Nothing is simulated: what the
progress bar shows comes from the queue and from the worker's /metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagemill.cli.local_worker import LocalWorker
from pagemill.cli.terminal.waiting import Waiting
from pagemill.demo.demo_rows import LABELS, MODEL, Row, job_fields, load_rows
from pagemill.demo.metrics import MetricsSampler, Usage
from pagemill.producer import Producer
from pagemill.producer.wire.schema.errors import PagemillError

QUEUE = "demo"
KV_BLOCKS = 512
"""Small, so that the metrics change visibly: thirty rows would fill it without a shared prefix."""
POLL_S = 0.1
SETTLE_S = 0.3
"""The engine publishes its metrics ten times per second: those of the last step are available after this time."""
SAMPLE_ROWS = 12
KEPT_VARIABLE = "PAGEMILL_CACHE_DIR"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Labelling:
    """The result of labeling the rows."""

    rows: list[Row]
    labels: dict[str, str]
    """Row id -> label, for the rows with a label."""
    errors: list[str]
    seconds: float
    usage: Usage

    @property
    def num_agreeing(self) -> int:
        """Number of rows whose label agrees with the human raters."""
        return sum(self.labels.get(row.id) == row.expected for row in self.rows)


def label_rows(
    url: str, metrics_url: str, rows: list[Row], worker: LocalWorker, console: Console
) -> Labelling:
    """Submit the rows as one batch and collect the labels, with a progress bar. Raises WorkerFailed."""
    with (
        Producer(url, queue=QUEUE) as producer,
        MetricsSampler(metrics_url) as sampler,
        _bar(console) as bar,
        _lines(console) as lines,
    ):
        task = bar.add_task("labeling", total=len(rows), rate=0.0, kv=0.0)
        started = time.monotonic()
        batch = producer.submit_many(job_fields(row) for row in rows)
        is_done = False
        while not is_done:
            # Count first, then check the worker: a dead one would leave its jobs waiting forever.
            counts = batch.counts()
            is_done = counts.done
            worker.check()
            usage = sampler.usage()
            rate = (usage.prompt_tokens + usage.generated_tokens) / (time.monotonic() - started)
            if lines is not None:
                lines.report(f"{counts.ended} of {len(rows)} rows")
            bar.update(task, completed=counts.ended, rate=rate, kv=100 * usage.mean_kv_utilization)
            time.sleep(0 if is_done else POLL_S)
        seconds = time.monotonic() - started
        time.sleep(SETTLE_S)
        sampler.sample()
        items = list(batch.results())
    return Labelling(
        rows=rows,
        labels={item.key: item.result.text for item in items if item.result is not None},
        errors=[f"row {i.key} {i.state}: {i.error.message}" for i in items if i.error is not None],
        seconds=seconds,
        usage=sampler.usage(),
    )


def sample_table(labeling: Labelling) -> Table:
    table = Table(title=f"{SAMPLE_ROWS} of {len(labeling.rows)} rows")
    table.add_column("review sentence", overflow="fold")
    for column in ("label", "people said"):
        table.add_column(column, no_wrap=True)
    for row in labeling.rows[:SAMPLE_ROWS]:
        label = labeling.labels.get(row.id, "-")
        mark = "green" if label == row.expected else "red"
        table.add_row(row.text, f"[{mark}]{label}[/]", f"{row.expected} ({row.rating:+.1f})")
    return table


def summary_table(labeling: Labelling, metrics_url: str) -> Table:
    usage, seconds, count = labeling.usage, labeling.seconds, len(labeling.rows)
    outside = sum(label not in LABELS for label in labeling.labels.values())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    figures = (
        ("rows labeled", f"{len(labeling.labels)} of {count}, {outside} outside the choices"),
        ("throughput", f"{count / seconds:.1f} rows/s"),
        ("", f"{usage.prompt_tokens / seconds:.0f} prompt + {usage.generated_tokens / seconds:.0f} output tokens/s"),
        ("agree with people", f"{labeling.num_agreeing} of {count} ({labeling.num_agreeing / count:.0%})"),
        ("KV blocks in use", f"peak {usage.peak_kv_utilization:.0%}, mean {usage.mean_kv_utilization:.0%} "
                             f"of {KV_BLOCKS}, over {usage.steps} steps"),
        ("prefix-cache hits", f"{usage.hit_rate:.0%} of {usage.prompt_tokens} prompt tokens"),
        ("metrics", metrics_url),
    )  # fmt: skip
    for name, figure in figures:
        table.add_row(name, figure)
    return table


def run(state_dir: Path, num_rows: int | None, keep: bool, console: Console) -> int:
    """The whole demo. Returns the exit code."""
    rows = load_rows(num_rows)
    options = ("--num-kv-blocks", str(KV_BLOCKS), "--drain-grace", "0")
    worker = LocalWorker(MODEL, queue=QUEUE, state_dir=state_dir, options=options)
    try:
        with Waiting(f"starting Valkey and a worker for {MODEL}") as waiting:
            url, info = worker.wait_ready(waiting.report)
        metrics_url = f"{info.url}/metrics"
        console.print(f"worker {info.id} is ready on {url}\nmetrics: {metrics_url}", soft_wrap=True)
        labeling = label_rows(url, metrics_url, rows, worker, console)
        console.print(sample_table(labeling), summary_table(labeling, metrics_url))
        for error in labeling.errors[:SAMPLE_ROWS]:
            console.print(error, style="red", markup=False)
        if keep:
            _stay(worker, url, console)
    finally:
        with Waiting("stopping the worker and its server", is_short=True) as waiting:
            exit_code = worker.stop(waiting.report)
    is_complete = len(labeling.labels) == len(rows) and exit_code == 0
    return 0 if is_complete else EXIT_FAILED


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pagemill.demo.run", description="Label rows of product reviews."
    )
    parser.add_argument("--rows", type=int, help="label only the first ROWS")
    parser.add_argument(
        "--state-dir", type=Path, help="keep the server's data here; default: a temporary one"
    )
    parser.add_argument("--keep", action="store_true", help="leave the worker up until Ctrl-C, to look at it")
    options = parser.parse_args(arguments)
    # The demo shows the defaults, on a separate server: the settings of this shell are ignored.
    for name in list(os.environ):
        if name.startswith("PAGEMILL_") and name != KEPT_VARIABLE:
            del os.environ[name]
    console = Console(width=None if sys.stdout.isatty() else 110)
    errors = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        state_dir = options.state_dir or Path(stack.enter_context(_temporary_directory()))
        state_dir.mkdir(parents=True, exist_ok=True)
        try:
            return run(state_dir, options.rows, options.keep, console)
        except (PagemillError, OSError) as error:
            errors.print(str(error), style="red", markup=False)
            return EXIT_FAILED
        except KeyboardInterrupt:
            errors.print("interrupted; the worker and its server are stopped")
            return EXIT_INTERRUPTED


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows  {task.fields[rate]:6.0f} tok/s  KV blocks in use {task.fields[kv]:3.0f} % (mean)"),
        TimeElapsedColumn(),
        console=console,
    )


def _lines(console: Console) -> contextlib.AbstractContextManager[Waiting | None]:
    """Print the number of rows if the bar cannot be drawn."""
    return contextlib.nullcontext() if console.is_terminal else Waiting("labeling")


def _stay(worker: LocalWorker, url: str, console: Console) -> None:
    console.print(
        f"the worker stays up; try: pagemill workers --redis-url {url} --queue {QUEUE}. Ctrl-C ends it."
    )
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            worker.check()
            time.sleep(0.5)


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pagemill-demo-")
