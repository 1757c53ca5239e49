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
    Report,
    Timeout,
    command_group,
    default_model,
    print_stderr,
)
from pagemill.cli.processes.worker import check_options
from pagemill.cli.terminal import options, views
from pagemill.cli.terminal.checked import YEAR_S, Cursor, between, checked, output_path, served_name
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.openai.batch_file import BatchFile
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.transport import wrap_errors

_STATES = (*ACTIVE_STATES, *END_STATES)

batch_app = command_group("batch", "Manage batches of OpenAI's files and of submit_many.")


@batch_app.command("run")
def batch_run(
    at: Report,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS", exists=True, dir_okay=False, help="Request file of OpenAI's Batch API."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            callback=output_path,
            help="Output file; errors go next to it. Default: REQUESTS.output.jsonl.",
        ),
    ] = None,
    model: options.ServedModel = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            callback=between(0.0, YEAR_S / 3600),
            help="Hours after which unfinished requests expire.",
        ),
    ] = None,
    cancel: options.CancelRun = False,
    worker_option: options.WorkerOption = None,
    quiet: options.Quiet = False,
) -> None:
    """Run a batch file. After an interruption, run the same command again."""
    check_options(worker_option)
    target = out or source.with_name(f"{source.stem}.output.jsonl")
    with run.reported(target), contextlib.ExitStack() as stack:
        batch = BatchFile(source, target, served_name(model) if model else None)
        count = batch.check()
        wanted = model or next(iter(sorted(batch.models())), None)
        serving = run.server(stack, at.redis_url, at.queue, wanted, worker_option or [], quiet)
        if wanted is None:
            batch.model = default_model(serving.url, at.queue)
        if within is not None:
            # By the server's clock, which expires the jobs.
            with wrap_errors(), open_client(serving.url, at.queue) as client:
                batch.deadline = client.time()[0] + 3600 * within
        producer = stack.enter_context(Producer(serving.url, queue=at.queue))
        if cancel:
            print_stderr(f"{batch.cancel(producer):,} requests cancelled")
            summary = batch.deliver(producer)
        else:
            bar = stack.enter_context(RunBar(count, serving.metrics_url, is_quiet=quiet))
            update = run.checked_update(bar.update, [serving])
            summary = batch.execute(producer, update, run.notifier(quiet))
    if at.as_json:
        typer.echo(json.dumps({"output": str(target), "errors": str(batch.errors_path), **asdict(summary)}))
    else:
        typer.echo(f"{summary.completed:,} of {summary.total:,} requests completed: {target}")
    if summary.failed:
        codes = ", ".join(f"{code} {n:,}" for code, n in sorted(summary.codes.items()))
        print_stderr(f"{summary.failed:,} failed ({codes}): {batch.errors_path}")
        raise typer.Exit(run.EXIT_FAILED_ROWS)


BatchId = Annotated[
    str,
    typer.Argument(metavar="ID", callback=checked(keys.Id), help="Batch id, as `submit_many` returns it."),
]


@batch_app.command("list")
def batch_list(
    at: Report,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="Number of batches to list, the latest first.")
    ] = 50,
) -> None:
    """List the batches of the queue, the latest first."""
    with at.producer() as producer:
        found, now = list(islice(producer.batches(), limit)), at.now()
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
def batch_status(at: Report, batch_id: BatchId) -> None:
    """Print the number of jobs of a batch by state."""
    with at.producer() as producer:
        counts = producer.batch(batch_id).counts()
    ended = f"{counts.ended:,} of {counts.total:,} ended"
    states = [(state, f"{getattr(counts, state):,}") for state in _STATES if getattr(counts, state)]
    document = {"id": batch_id, **counts.model_dump(), "done": counts.done}
    at.print(document, [("batch", batch_id), ("jobs", ended), *states])


@batch_app.command("cancel")
def batch_cancel(at: AtQueue, batch_id: BatchId) -> None:
    """Cancel the unfinished jobs of a batch. Results of finished jobs are kept."""
    with at.producer() as producer:
        handle = producer.batch(batch_id)
        handle.counts()  # an unknown batch is an error, not one without jobs
        stopped = handle.cancel()
    print_stderr(f"{stopped:,} jobs of batch {batch_id} are cancelled, or will be within a moment")


@batch_app.command("ack")
def batch_ack(
    at: AtQueue,
    batch_id: BatchId,
    cursor: Annotated[
        str | None,
        typer.Option(
            "--up-to",
            metavar="CURSOR",
            callback=checked(Cursor),
            help="Cursor of the last line to free. Default: all finished jobs.",
        ),
    ] = None,
) -> None:
    """Free the memory of a batch's results. They cannot be read again."""
    with at.producer() as producer:
        handle = producer.batch(batch_id)
        ended = handle.counts().ended
        freed = handle.ack(cursor or f"e{ended}")
    print_stderr(f"{freed:,} results of batch {batch_id} are freed")


@batch_app.command("results")
def batch_results(
    at: AtQueue,
    batch_id: BatchId,
    ordered: Annotated[bool, typer.Option("--ordered", help="Sort by the order of submission.")] = False,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="CURSOR",
            callback=checked(Cursor),
            help="Cursor of a line: print only later lines.",
        ),
    ] = None,
    timeout: Timeout = None,
) -> None:
    """Print each result as a line of JSON, until all jobs have finished.

    `--timeout 0` prints what is there.
    """
    with at.producer() as producer:
        try:
            for item in producer.batch(batch_id).results(ordered=ordered, after=after, timeout=timeout):
                typer.echo(item.model_dump_json())
        except KeyboardInterrupt:
            print_stderr(
                f"\nthe batch continues: pagemill batch results {batch_id}, or pagemill batch cancel {batch_id}"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
