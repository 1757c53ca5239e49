"""`pagemill inspect ID`: one job's history as a timeline."""

from __future__ import annotations

import sys
import time

import typer
from rich.text import Text

from pagemill.cli.app import OneJob, Report, app, print_stderr
from pagemill.cli.terminal import views
from pagemill.producer.client.preparer import check_id
from pagemill.producer.wire.calls import reads, registry
from pagemill.producer.wire.calls.history import JobHistory, history
from pagemill.producer.wire.calls.timeline import timeline
from pagemill.producer.wire.schema.errors import JobNotFound

_COLORS = {
    "succeeded": "green", "running": "cyan", "retried": "yellow", "lost": "yellow", "crashed": "red",
    "failed": "red", "dead": "red", "expired": "yellow",
}  # fmt: skip


@app.command()
def inspect(job: OneJob, at: Report) -> None:
    """Print the timeline of a job. It names the workers, and contains no prompt and no output."""
    found = at.run(history(at.queue, check_id(job.job_id)))
    if found is None:
        raise JobNotFound.for_job(job.job_id)
    if at.as_json:
        typer.echo(found.model_dump_json())
        return
    print_history(found)
    if found.state == "queued":
        _explain_wait(found, at)


def _explain_wait(job: JobHistory, at: Report) -> None:
    """Suggest the operator's next command, if there is something to do."""
    if at.run(registry.stats_page(job.queue)).totals.paused:
        print_stderr(
            f"queue {job.queue} is paused; resume it with: pagemill queue resume --queue {job.queue}"
        )
    if not job.live_workers:
        print_stderr(
            f"no live worker serves {job.model}; start one (pagemill worker --model ... --queue {job.queue}), "
            f"or see what does run: pagemill workers --queue {job.queue}"
        )
    elif job.unmet:
        print_stderr(f"no live worker of {job.model} knows all that the job needs: {', '.join(job.unmet)}")
    elif (status := at.run(reads.statuses(job.queue, [job.id]))[0]) is not None and status.error:
        print_stderr(status.error)


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
        "webhook": _webhook(job),
    }
    views.print_rows((), [(name, value) for name, value in facts.items() if value])
    if sys.stdout.isatty():
        typer.echo()
    events = [
        (
            Text(_clock(at), style="dim"),
            Text(_since(at, job), style="dim", justify="right"),
            Text(what, style=_COLORS.get(what, "")),
            where,
            Text(why, overflow="fold"),
        )
        for at, what, where, why in timeline(job)
    ]
    views.print_rows((), events)


def _progress(job: JobHistory) -> str:
    progress = job.progress
    if not progress.updated_at:
        return ""
    return (
        f"{progress.prompt_tokens_done}/{progress.prompt_tokens} prompt tokens, "
        f"{progress.generated_tokens}/{progress.max_tokens} generated"
    )


def _webhook(job: JobHistory) -> str:
    webhook = job.webhook
    if webhook is None:
        return ""
    if job.finished_at is None:
        return f"{webhook.host}, called when the job ends"
    parts = [webhook.host, f"{webhook.tries} {'try' if webhook.tries == 1 else 'tries'}", webhook.outcome]
    if webhook.next_at is not None:
        parts.append(f"next try at {_clock(webhook.next_at)}")
    return ", ".join(filter(None, parts))


def _clock(moment: float | None) -> str:
    """Format as local time, with the date unless it is today's."""
    if moment is None:
        return ""
    at = time.localtime(moment)
    day = "" if time.strftime("%F", at) == time.strftime("%F") else time.strftime("%F ", at)
    return f"{day}{time.strftime('%T', at)}.{int(moment % 1 * 1000):03d}"


def _since(moment: float | None, job: JobHistory) -> str:
    return "" if moment is None else f"{moment - job.created_at:+.3f} s"
