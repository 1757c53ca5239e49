"""Output of the commands: tables for a terminal, tab-separated lines for a pipe, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagemill.common.plain_text import escaped
from pagemill.producer.doctor.memory_check import held_by, in_words, remedy
from pagemill.producer.wire.calls.memory import Kind
from pagemill.producer.wire.calls.registry import QueueStats, WorkerInfo
from pagemill.producer.wire.schema.completion_estimate import CompletionEstimate
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES, JobStatus, Result, StreamEvent

_PRIORITIES = ("high", "normal", "low")
_STATES = (*ACTIVE_STATES, *END_STATES)


def print_result(result: Result, as_json: bool) -> None:
    """Print the text of every sample, after its log-probability if it was scored, and its calls, one a line.

    Of a choice with `label_probs`, each label's probability, the highest first. Of a job for vectors, a vector a
    line; of labels, a label a line with its number; of scores, a score a line.
    """
    if as_json:
        _print_model(result)
        return
    if result.rows is not None:
        _print_rows_of_numbers(result)
        return
    for output in result.outputs:
        if output.label_probs is not None:
            _print_probabilities(output.label_probs)
            continue
        if output.text or not output.tool_calls:
            typer.echo(output.text if output.logprob is None else f"{output.logprob:.4f}\t{output.text}")
        for call in output.tool_calls:
            typer.echo(f"{call.function.name} {call.function.arguments}")


def _print_probabilities(numbers: Mapping[str, float]) -> None:
    for label in sorted(numbers, key=lambda name: -numbers[name]):
        typer.echo(f"{numbers[label]:.4f}\t{escaped(label)}")


def _print_rows_of_numbers(result: Result) -> None:
    if result.labels is not None:
        for numbers in result.classes:
            _print_probabilities(numbers)
        return
    for row in result.embeddings:
        typer.echo(f"{row[0]:.4f}" if len(row) == 1 else json.dumps(row))


def estimate_line(estimate: CompletionEstimate | None, now: float) -> str:
    """Return when a job will probably end; None: it was submitted before, under its idempotency key.

    `now`: the server's clock in Unix seconds, here and in the other functions.
    """
    if estimate is None:
        return "no estimate: it was submitted before"
    if estimate.p50 is None or estimate.p90 is None:
        return "no estimate: no live worker of its model has measured its speed, or the queue is paused"
    p50, p90 = (max(0.0, at - now) for at in (estimate.p50, estimate.p90))
    late = "; that is after its deadline" if estimate.misses_deadline else ""
    return f"it will probably end in {p50:.1f} s{late}; by nine chances of ten in {p90:.1f} s"


def estimate_fields(estimate: CompletionEstimate | None) -> dict[str, Any] | None:
    """Return it as JSON."""
    return None if estimate is None else asdict(estimate) | {"misses_deadline": estimate.misses_deadline}


class StreamPrinter:
    """Prints the first sample's text as it arrives. A snapshot replaces earlier text, so it starts over."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._has_open_line = False

    def print(self, event: StreamEvent) -> None:
        if self._as_json:
            typer.echo(event.model_dump_json())
            return
        if self._has_open_line and event.type in ("snapshot", "end"):
            typer.echo()
            self._has_open_line = False
        if event.text and event.index == 0:
            typer.echo(event.text, nl=False)
            self._has_open_line = True


def print_status(status: JobStatus, now: float, as_json: bool) -> None:
    if as_json:
        _print_model(status)
        return
    progress = status.progress
    is_known = progress.updated_at > 0
    rows: list[tuple[str, Any]] = [
        ("id", status.id),
        ("state", status.state),
        ("model", status.model),
        ("queue", status.queue),
        ("priority", status.priority),
        ("waiting before it", status.position),
        ("submitted", ago(status.created_at, now)),
        ("started", ago(status.started_at, now)),
        ("finished", ago(status.finished_at, now)),
        ("worker", status.worker),
        ("attempt", status.attempt or None),
        ("crashes", status.crashes or None),
        (
            "prompt",
            f"{progress.prompt_tokens_done}/{progress.prompt_tokens} tokens" if is_known else None,
        ),
        (
            "generated",
            f"{progress.generated_tokens}/{progress.max_tokens} tokens" if is_known else None,
        ),
        ("follows the equal job", status.leader),
        ("replays", status.replay_of),
        ("waits for the end of", " ".join(status.waits_for) or None),
        ("error", status.error),
    ]
    print_rows((), [(name, value) for name, value in rows if value is not None])


WORKER_COLUMNS = ("worker", "state", "models", "revision", "jobs", "host", "pid", "started", "metrics")


def worker_row(w: WorkerInfo, now: float) -> tuple[Any, ...]:
    """Return the cells of `WORKER_COLUMNS`."""
    started = ago(w.started_at, now)
    return w.id, w.state, ",".join(w.models), w.revision, w.running, w.host, w.pid, started, w.url or ""


def print_queue(queue: str, stats: QueueStats, kinds: Mapping[Kind, float], as_json: bool) -> None:
    """Print a queue's metrics. `kinds`: memory by kind of data, if the server's memory is low."""
    waiting = [
        {
            "priority": priority,
            "tenant": tenant,
            "model": model,
            "jobs": jobs,
            "oldest_s": stats.oldest_s[lane],
        }
        for lane in sorted(stats.waiting, key=lambda lane: (_PRIORITIES.index(lane[0]), *lane[1:]))
        for (priority, tenant, model), jobs in ((lane, stats.waiting[lane]),)
    ]
    if as_json:
        document = {
            "queue": queue,
            "paused": stats.paused,
            "counts": stats.counts,
            "leases": stats.leases,
            "dead": stats.dead,
            "followers": stats.followers,
            "memory": asdict(stats.memory) | {"kinds": dict(kinds)},
            "waiting": waiting,
        }
        typer.echo(json.dumps(document))
        return
    print_rows(
        (),
        [
            ("queue", queue),
            ("paused", "yes" if stats.paused else "no"),
            *((state, stats.counts[state]) for state in _STATES if state in stats.counts),
            ("leases", stats.leases),
            ("dead letters", stats.dead),
            ("waiting for an equal job", stats.followers),
            ("memory of Redis", in_words(stats.memory)),
            *([("is held by", held_by(kinds)), ("see", remedy(queue, kinds))] if kinds else []),
        ],
    )
    if waiting:
        columns = ("priority", "tenant", "model", "jobs", "oldest_s")
        print_rows(columns, [tuple(lane[column] for column in columns) for lane in waiting])


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table to a terminal; to a pipe a header and tab-separated lines, untruncated.

    Pairs without columns are a record, with its names in bold. A cell may be a styled `Text`; any other cannot control
    the terminal or add a cell.
    """
    rows = [[cell if isinstance(cell, Text) else escaped(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in ([columns] if columns else []) + rows:
            typer.echo("\t".join(map(str, row)))
        return
    table = Table(*columns, show_header=bool(columns), box=None, pad_edge=False)
    if not columns and all(len(row) == 2 for row in rows):
        table.add_column(style="bold")
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _print_model(model: BaseModel) -> None:
    typer.echo(model.model_dump_json())


def ago(moment: float | None, now: float) -> str | None:
    """Format the time since a moment; never negative."""
    return None if moment is None else f"{max(0.0, now - moment):.1f} s ago"


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print a record, one field per line; nested values as JSON."""
    rows = [
        (name, value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False))
        for name, value in fields.items()
        if value not in (None, "", [])
    ]
    print_rows((), rows)
