"""The live page in a terminal: `pagemill top` draws a worker's `/live.json` and the queue's metrics.

Rendering only, from plain values to rich renderables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagemill.monitoring.live.feed import OtherWorker
from pagemill.monitoring.queue_figures import QueueFigures

SPARKS = "▁▂▃▄▅▆▇█"
STATES = {
    "a": ("active", "dodger_blue2"),
    "s": ("shared", "dark_orange"),
    "c": ("cached", "steel_blue"),
    "f": ("free", "grey23"),
    "r": ("reserved", "grey54"),
}
_BUSIEST = "sacrf"
_TONES = {"ready": "green", "loading": "yellow", "draining": "yellow", "unhealthy": "red", "succeeded": "green",
          "failed": "red", "dead": "red", "retried": "yellow", "lost": "yellow", "expired": "yellow"}  # fmt: skip
_RUN = re.compile(r"(\d*)([a-z])")
MAP_ROWS = 8
BAR_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class TopView:
    """The metrics at one moment."""

    queue: QueueFigures | None = None
    """None: Redis does not respond, or was not queried."""
    workers: Sequence[OtherWorker] = ()
    live: Mapping[str, Any] | None = None
    """A worker's `/live.json`."""
    notes: Sequence[str] = field(default_factory=tuple)
    """Missing metrics, and the reasons."""


def screen(view: TopView, width: int, height: int, *, colors: bool = True) -> RenderableType:
    """Draw everything that fits; the lists at the end are cut to the height."""
    parts: list[RenderableType] = [_head(view)]
    if view.queue is not None:
        parts.append(_queue(view.queue))
    parts += [Text(note, style="yellow") for note in view.notes]
    live = view.live
    used = 4 + len(view.notes)
    if len(view.workers) > 1 or live is None:
        parts.append(_workers(view.workers, live))
        used += len(view.workers) + 2
    if live is not None and live["kv"] is not None:
        parts.append(_figures(live, width))
        parts.append(_block_map(live, width, colors))
        used += 6 + MAP_ROWS
    if live is not None:
        room = max(6, height - used)
        jobs = min(len(live["jobs"]["shown"]), max(2, room - 9))
        parts.append(_jobs(live, jobs))
        parts.append(_ends(live, max(2, room - jobs - 5)))
    return Group(*parts)


def unpack(runs: str) -> str:
    """Expand `3f2as` to `fffaas`."""
    return "".join(letter * int(length or 1) for length, letter in _RUN.findall(runs))


def sparkline(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Draw the last `width` values as bars, with a gap for an unknown value."""
    shown = list(values)[-width:]
    highest = top or max((value for value in shown if value is not None), default=0.0) or 1.0
    last = len(SPARKS) - 1
    return "".join(
        " " if value is None else SPARKS[min(last, max(0, round(value / highest * last)))] for value in shown
    )


def cells(states: str, columns: int, rows: int) -> list[str]:
    """Lay out up to `rows` rows of `columns` cells; a cell of several blocks shows the busiest."""
    group = max(1, -(-len(states) // (columns * rows)))
    grouped = [
        next((letter for letter in _BUSIEST if letter in states[start : start + group]), "f")
        for start in range(0, len(states), group)
    ]
    return ["".join(grouped[start : start + columns]) for start in range(0, len(grouped), columns)]


def _head(view: TopView) -> RenderableType:
    live = view.live
    if live is None:
        return Text("pagemill top", style="bold")
    worker, engine = live["worker"], live["engine"]
    line = Text()
    line.append(engine["model"] if engine else "pagemill", style="bold")
    line.append(f"  {worker['state']}", style=_TONES.get(worker["state"], ""))
    if not worker["redis_up"]:
        line.append("  Redis away", style="red")
    if worker["blocked"]:
        line.append(f"  not pulling: {worker['blocked']}", style="dim")
    line.append(f"  worker {worker['id']}  up {_seconds(worker['uptime_s'])}", style="dim")
    if engine:
        line.append(f"  {engine['device']} {engine['tier']}", style="dim")
    return line


def _queue(queue: QueueFigures) -> RenderableType:
    waiting = sum(queue.waiting.values())
    oldest = max(queue.oldest_age_seconds.values(), default=0.0)
    line = Text(f"queue {queue.queue}  ")
    line.append(f"{waiting:,} waiting", style="bold")
    line.append(f"  oldest {_seconds(oldest)}  {queue.running:,} running  {queue.delayed:,} delayed  ")
    line.append(f"{queue.dead:,} dead", style="red" if queue.dead else "")
    if queue.paused:
        line.append("  paused", style="yellow")
    return line


def _workers(workers: Sequence[OtherWorker], live: Mapping[str, Any] | None) -> RenderableType:
    if not workers:
        return Text("no worker is alive", style="yellow")
    table = _table("worker", "state", "models", "jobs", "metrics")
    shown = live["worker"]["id"] if live is not None else None
    for worker in workers:
        mark = ">" if worker.id == shown else " "
        state = Text(worker.state, style=_TONES.get(worker.state, ""))
        table.add_row(
            f"{mark} {worker.id}", state, ",".join(worker.models), str(worker.running), worker.url or ""
        )
    return table


def _figures(live: Mapping[str, Any], width: int) -> RenderableType:
    kv, engine, history = live["kv"], live["engine"], live["history"]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    room = max(10, width - 70)
    hits = kv["prefix_hit_tokens"] / kv["prefix_queried_tokens"] if kv["prefix_queried_tokens"] else 0.0
    rows: list[tuple[str, str, str, str]] = [
        (
            "KV in use", f"{kv['utilization']:.0%}", sparkline(history["active"], room, 1.0),
            f"{kv['active']:,} of {kv['capacity']:,}  peak {kv['peak']:.0%}  prefix hits {hits:.0%}",
        ),
        (
            "tokens/s", f"{_recent(history['generated']):,.0f}", sparkline(history["generated"], room),
            f"{_recent(history['computed']):,.0f} through the model",
        ),
        (
            "running", f"{engine['running']}", sparkline(history["running"], room, engine["max_num_seqs"]),
            f"of {engine['max_num_seqs']}  {engine['waiting']} waiting  {engine['preemptions']} preempted",
        ),
        ("queue", f"{history['queued'][-1] if history['queued'] and history['queued'][-1] is not None else '-'}",
         sparkline(history["queued"], room), ""),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _block_map(live: Mapping[str, Any], width: int, colors: bool) -> RenderableType:
    if live["blocks"] is None:
        return Text("block map: in a moment", style="dim")
    states = unpack(live["blocks"]["runs"])
    title = Text("KV blocks ", style="dim")
    for letter, (name, color) in STATES.items():
        title.append("■ " if colors else f"{letter}=", style=color)
        title.append(f"{name} {states.count(letter):,}  ")
    lines = Text(no_wrap=True)
    for row in cells(states, max(10, width - 2), MAP_ROWS):
        for run in re.finditer(r"(.)\1*", row):
            lines.append("■" * len(run[0]) if colors else run[0], style=STATES[run[1]][1])
        lines.append("\n")
    lines.rstrip()
    return Group(title, lines)


def _jobs(live: Mapping[str, Any], most: int) -> RenderableType:
    jobs = live["jobs"]
    table = _table("running job", "phase", "progress", "tokens", "for", "try")
    for job in jobs["shown"][:most]:
        is_decoding = job["phase"] == "decode"
        done = job["generated_tokens"] if is_decoding else job["prompt_tokens_done"]
        total = job["max_tokens"] if is_decoding else job["prompt_tokens"]
        bar = ProgressBar(total=max(1, total), completed=done, width=BAR_COLUMNS)
        attempt = f"{job['attempt']} +{job['crashes']}" if job["crashes"] else str(job["attempt"])
        table.add_row(
            _short(job["id"]), job["phase"], bar, f"{done:,}/{total:,}", _seconds(job["age_s"]), attempt
        )
    left = jobs["total"] - min(most, len(jobs["shown"]))
    return Group(table, Text(f"and {left} more", style="dim")) if left > 0 else table


def _ends(live: Mapping[str, Any], most: int) -> RenderableType:
    """List the last completions, with the reason for failures."""
    table = _table("ended", "outcome", "tokens", "took", "ago", "why")
    for end in live["ends"][:most]:
        outcome = Text(end["outcome"], style=_TONES.get(end["outcome"], ""))
        # Text, not a string: rich could read markup in a message.
        why = Text(": ".join(filter(None, (end["code"], end["message"]))), overflow="ellipsis", no_wrap=True)
        table.add_row(
            _short(end["id"]),
            outcome,
            f"{end['tokens']:,}",
            _seconds(end["took_s"]),
            _seconds(end["ago_s"]),
            why,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    return table


def _short(job_id: str) -> str:
    """Shorten a job id to a distinguishing part."""
    return job_id if len(job_id) <= 14 else f"{job_id[:12]}…"


def _recent(values: Sequence[float | None]) -> float:
    """Return the mean of the last five seconds."""
    last = [value for value in values[-5:] if value is not None]
    return sum(last) / len(last) if last else 0.0


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    if value < 5400:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"
