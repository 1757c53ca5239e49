"""`pagemill batch`: OpenAI's batch files, and the batches that producers submitted.

Exit codes of `run` as for `pagemill run`; of the others 0 done, 1 there is no such batch, or not in time.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from pagemill.cli import run
from pagemill.cli.app import (
    EXIT_INTERRUPTED,
    AtQueue,
    Patience,
    Report,
    command_group,
    default_model,
    print_stderr,
)
from pagemill.cli.processes.worker import check_options
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import YEAR_S, Cursor, OutputPath, between, served_name
from pagemill.cli.terminal.options import Options
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.openai.batch_file import BatchFile
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.transport import wrap_errors

_STATES = (*ACTIVE_STATES, *END_STATES)

batch_app = command_group("batch", "Manage batches of OpenAI's files and of submit_many.")


class BatchRunOptions(Options):
    source: Annotated[Path, typer.Argument(metavar="REQUESTS", exists=True, dir_okay=False)]
    """Request file of OpenAI's Batch API."""
    out: OutputPath | None = None
    """Output file; errors go next to it. Default: REQUESTS.output.jsonl."""
    model: run.ServedModel = None
    within: Annotated[float | None, between(0.0, YEAR_S / 3600)] = None
    """Hours after which unfinished requests expire."""
    cancel: run.Cancel = False


@batch_app.command("run")
def batch_run(flags: BatchRunOptions, serve: run.ServeOptions, at: Report) -> None:
    """Run a batch file. After an interruption, run the same command again."""
    check_options(serve.worker_option)
    target = flags.out or flags.source.with_name(f"{flags.source.stem}.output.jsonl")
    with run.reported(target), contextlib.ExitStack() as stack:
        batch = BatchFile(flags.source, target, served_name(flags.model) if flags.model else None)
        count = batch.check()
        wanted = flags.model or next(iter(sorted(batch.models())), None)
        serving = run.server(stack, at.redis_url, at.queue, wanted, serve)
        if wanted is None:
            batch.model = default_model(serving.url, at.queue)
        if flags.within is not None:
            # By the server's clock, which expires the jobs.
            with wrap_errors(), open_client(serving.url, at.queue) as client:
                batch.deadline = client.time()[0] + 3600 * flags.within
        producer = stack.enter_context(Producer(serving.url, queue=at.queue))
        if flags.cancel:
            print_stderr(f"{batch.cancel(producer):,} requests cancelled")
            summary = batch.deliver(producer)
        else:
            bar = stack.enter_context(RunBar(count, serving.metrics_url, is_quiet=serve.quiet))
            update = run.checked_update(bar.update, [serving])
            summary = batch.execute(producer, update, run.notifier(serve.quiet))
    if at.as_json:
        typer.echo(json.dumps({"output": str(target), "errors": str(batch.errors_path), **asdict(summary)}))
    else:
        typer.echo(f"{summary.completed:,} of {summary.total:,} requests completed: {target}")
    if summary.failed:
        codes = ", ".join(f"{code} {n:,}" for code, n in sorted(summary.codes.items()))
        print_stderr(f"{summary.failed:,} failed ({codes}): {batch.errors_path}")
        raise typer.Exit(run.EXIT_FAILED_ROWS)


class OneBatch(Options):
    batch_id: Annotated[keys.Id, typer.Argument(metavar="ID")]
    """Batch id, as `submit_many` returns it."""


class BatchListOptions(Options):
    limit: Annotated[int, between(1, 100_000)] = 50
    """Number of batches to list, the latest first."""


@batch_app.command("list")
def batch_list(flags: BatchListOptions, at: Report) -> None:
    """List the batches of the queue, the latest first."""
    with at.producer() as producer:
        found, now = list(islice(producer.batches(), flags.limit)), at.now()
    at.print(
        [info.model_dump() for info in found],
        [
            (
                info.id,
                views.ago(info.created_at, now),
                info.counts.total,
                *(getattr(info.counts, s) for s in _STATES),
            )
            for info in found
        ],
        ("batch", "created", "jobs", *_STATES),
        none=f"queue {at.queue} has no batches",
    )


@batch_app.command("status")
def batch_status(batch: OneBatch, at: Report) -> None:
    """Print the number of jobs of a batch by state."""
    with at.producer() as producer:
        counts = producer.batch(batch.batch_id).counts()
    ended = f"{counts.ended:,} of {counts.total:,} ended"
    states = [(state, f"{getattr(counts, state):,}") for state in _STATES if getattr(counts, state)]
    document = {"id": batch.batch_id, **counts.model_dump(), "done": counts.done}
    at.print(document, [("batch", batch.batch_id), ("jobs", ended), *states])


@batch_app.command("cancel")
def batch_cancel(batch: OneBatch, at: AtQueue) -> None:
    """Cancel the unfinished jobs of a batch. Results of finished jobs are kept."""
    with at.producer() as producer:
        handle = producer.batch(batch.batch_id)
        handle.counts()  # an unknown batch is an error, not one without jobs
        stopped = handle.cancel()
    print_stderr(f"{stopped:,} jobs of batch {batch.batch_id} are cancelled, or will be within a moment")


class AckOptions(Options):
    cursor: Annotated[Cursor | None, typer.Option("--up-to", metavar="CURSOR")] = None
    """Cursor of the last line to free. Default: all finished jobs."""


@batch_app.command("ack")
def batch_ack(batch: OneBatch, flags: AckOptions, at: AtQueue) -> None:
    """Free the memory of a batch's results. They cannot be read again."""
    with at.producer() as producer:
        handle = producer.batch(batch.batch_id)
        ended = handle.counts().ended
        freed = handle.ack(flags.cursor or f"e{ended}")
    print_stderr(f"{freed:,} results of batch {batch.batch_id} are freed")


class BatchResultsOptions(Options):
    ordered: bool = False
    """Sort by the order of submission."""
    after: Annotated[Cursor | None, typer.Option(metavar="CURSOR")] = None
    """Cursor of a line: print only later lines."""


@batch_app.command("results")
def batch_results(batch: OneBatch, flags: BatchResultsOptions, patience: Patience, at: AtQueue) -> None:
    """Print each result as a line of JSON, until all jobs have finished.

    `--timeout 0` prints what is there.
    """
    with at.producer() as producer:
        try:
            for item in producer.batch(batch.batch_id).results(**vars(flags), **vars(patience)):
                typer.echo(item.model_dump_json())
        except KeyboardInterrupt:
            print_stderr(
                f"\nthe batch continues: pagemill batch results {batch.batch_id}, "
                f"or pagemill batch cancel {batch.batch_id}"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
