"""`pagemill why ID`: where a job's time went, or with `--batch` that of the jobs of a batch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pagemill.cli.app import Report, app
from pagemill.cli.terminal import views
from pagemill.cli.terminal.options import Options
from pagemill.producer.client.preparer import check_id
from pagemill.producer.wire.calls import account, batches
from pagemill.producer.wire.calls.account import MEANINGS, Cause, JobAccount, sums_of
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import JobNotFound

MAX_SAMPLE = 200
"""Jobs of a batch that are read, at equal distances in the order of submission."""


class JobOrBatch(Options):
    job_id: Annotated[keys.Id | None, typer.Argument(metavar="[ID]")] = None
    """Job id."""
    batch: Annotated[keys.Id | None, typer.Option(metavar="ID")] = None
    """Batch id: print sums over its jobs."""


@app.command()
def why(of: JobOrBatch, at: Report) -> None:
    """Explain where the time of a job or a batch went."""
    if (of.job_id is None) == (of.batch is None):
        raise typer.BadParameter("a job id or --batch is required")
    if of.batch is not None:
        _print_batch(at, of.batch)
        return
    assert of.job_id is not None
    found = at.run(account.why(at.queue, check_id(of.job_id)))
    if found is None:
        raise JobNotFound.for_job(of.job_id)
    if at.as_json:
        typer.echo(found.model_dump_json())
        return
    _print_account(found)


def _print_account(job: JobAccount) -> None:
    """Print a line per cause with seconds, share and meaning; tab-separated for a pipe."""
    rows = [
        (part.cause, f"{part.seconds:.3f} s", _share(part.seconds, job.seconds), _explained(part.cause, job))
        for part in job.parts
    ]
    ended = (job.state, f"{job.seconds:.3f} s", _share(job.seconds, job.seconds), _sooner(job))
    views.print_rows((), [*rows, ended])


def _print_batch(at: Report, batch: str) -> None:
    """Print sums and quantiles by cause over jobs of a batch."""
    counts = at.run(batches.counts(at.queue, batch))
    if counts is None:
        raise JobNotFound(f"no batch {batch}: never submitted, or its jobs have been removed")
    step = max(1, -(-counts.total // MAX_SAMPLE))
    ids = at.run(batches.sample(at.queue, batch, range(0, counts.total, step)))
    found = [job for each in ids if (job := at.run(account.why(at.queue, each))) is not None]
    sums = sums_of(found)
    if at.as_json:
        causes = [each.model_dump() for each in sums]
        typer.echo(
            json.dumps({"batch": batch, "jobs": counts.total, "sampled": len(found), "causes": causes})
        )
        return
    total = sum(each.seconds for each in sums)
    times = [(each, (each.seconds, each.p50, each.p90, each.p99)) for each in sums]
    rows = [
        (each.cause, _share(each.seconds, total), *(f"{time:.3f} s" for time in four)) for each, four in times
    ]
    views.print_rows(("cause", "share", f"{len(found)} of {counts.total} jobs", "p50", "p90", "p99"), rows)


def _share(seconds: float, total: float) -> str:
    return f"{seconds / total:.0%}" if total else ""


def _sooner(job: JobAccount) -> str:
    changes = [f"{each.seconds:.3g} s earlier with {each.change}" for each in job.earlier]
    return f"would have started about {' or '.join(changes)}" if changes else ""


def _explained(cause: Cause, job: JobAccount) -> str:
    meaning = MEANINGS[cause]
    match cause:
        case "behind" if job.behind:
            jobs = (
                f"{each.jobs} of {each.tenant or 'other tenants'} at {each.priority or 'any priority'}"
                for each in job.behind
            )
            return f"{meaning}; started meanwhile: {', '.join(jobs)}"
        case "prompt" if job.prompt_tokens and job.cached_tokens is not None:
            return f"{meaning}: {job.prompt_tokens} tokens, {job.cached_tokens} of them cached"
        case "decode" if job.decoded_beside is not None:
            return f"{meaning}, beside {job.decoded_beside:.1f} other sequences on average"
    return meaning
