"""`pagemill inspect ID`: one job's history as a timeline."""

from __future__ import annotations

import sys
import time

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagemill.cli.app import AsJson, JobId, Queue, RedisUrl, app, ask, say
from pagemill.producer.client.preparer import check_id
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.history import JobHistory, history
from pagemill.producer.wire.calls.timeline import timeline
from pagemill.producer.wire.schema.errors import JobNotFound

_COLOURS = {
    "succeeded": "green", "running": "cyan", "retried": "yellow", "lost": "yellow", "crashed": "red",
    "failed": "red", "dead": "red", "expired": "yellow",
}  # fmt: skip


@app.command()
def inspect(
    job_id: JobId, redis_url: RedisUrl = None, queue: Queue = "default", as_json: AsJson = False
) -> None:
    """A job's timeline: submit, executions, errors, end. Names the workers; shows no prompt and no output."""
    found = ask(redis_url, history(queue, check_id(job_id)))
    if found is None:
        raise JobNotFound(f"no job {job_id}: never submitted, or its record has been removed")
    if as_json:
        typer.echo(found.model_dump_json())
        return
    print_history(found)
    if found.state == "queued":
        _say_why_it_waits(found, redis_url)


def _say_why_it_waits(job: JobHistory, redis_url: str | None) -> None:
    """Suggest the operator's next command, if there is something to do."""
    if ask(redis_url, registry.stats_page(job.queue)).totals.paused:
        say(f"queue {job.queue} is paused; go on with: pagemill queue resume --queue {job.queue}")
    if not job.live_workers:
        say(
            f"no live worker serves {job.model}; start one (pagemill worker --model ... --queue {job.queue}), "
            f"or see what does run: pagemill workers --queue {job.queue}"
        )


def print_history(job: JobHistory) -> None:
    """Print a header of facts and a line per event; tab-separated for a pipe."""
    facts = {
        "id": job.id,
        "state": job.state + (f", to be {job.stop_asked}" if job.stop_asked else ""),
        "model": job.model + ("" if job.live_workers else " (no live worker serves it)"),
        "queue": f"{job.queue}, tenant {job.tenant}, priority {job.priority}",
        "batch": " ".join(filter(None, (job.batch, job.key))),
        "shares the end of": job.leader or "",
        "replay of": job.replay_of or "",
        "after": " ".join(job.after),
        "waits for the end of": " ".join(job.waits_for),
        "replayed as": job.replayed_as or "",
        "failed attempts": str(job.attempts_failed or ""),
        "crashes": str(job.crashes or ""),
        "progress": _progress(job),
    }
    facts = {name: value for name, value in facts.items() if value}
    events = list(timeline(job))
    if not sys.stdout.isatty():
        for name, value in facts.items():
            typer.echo(f"{name}\t{value}")
        for at, what, where, why in events:
            typer.echo("\t".join((_clock(at), _since(at, job), what, where, why)))
        return
    console = Console(highlight=False, markup=False)
    head = Table(box=None, show_header=False, pad_edge=False)
    head.add_column(style="bold")
    for name, value in facts.items():
        head.add_row(name, value)
    console.print(head)
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(style="dim", justify="right")
    for at, what, where, why in events:
        table.add_row(
            _clock(at),
            _since(at, job),
            Text(what, style=_COLOURS.get(what, "")),
            where,
            Text(why, overflow="fold"),
        )
    console.print(table)


def _progress(job: JobHistory) -> str:
    progress = job.progress
    if not progress.updated_at:
        return ""
    return (
        f"{progress.prompt_tokens_done}/{progress.prompt_tokens} prompt tokens, "
        f"{progress.generated_tokens}/{progress.max_tokens} generated"
    )


def _clock(moment: float | None) -> str:
    """Format as local time, with the date unless it is today's."""
    if moment is None:
        return ""
    at = time.localtime(moment)
    day = "" if time.strftime("%F", at) == time.strftime("%F") else time.strftime("%F ", at)
    return f"{day}{time.strftime('%T', at)}.{int(moment % 1 * 1000):03d}"


def _since(moment: float | None, job: JobHistory) -> str:
    return "" if moment is None else f"{moment - job.created_at:+.3f} s"
