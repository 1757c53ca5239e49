"""`pagemill batch`: OpenAI's batch files, and the batches that producers submitted.

Exit codes of `run` as for `pagemill run`; of the others 0 done, 1 there is no such batch, or not in time.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from pagemill.cli import run
from pagemill.cli.app import (
    EXIT_INTERRUPTED,
    AsJson,
    Queue,
    RedisUrl,
    Timeout,
    app,
    default_model,
    say,
)
from pagemill.cli.processes.worker import check_options
from pagemill.cli.terminal import options, views
from pagemill.cli.terminal.checked import YEAR_S, Cursor, between, checked, served_name
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.openai.batch_file import BatchFile
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES

_STATES = (*ACTIVE_STATES, *END_STATES)

batch_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Batches: OpenAI's files, and submit_many's."
)
app.add_typer(batch_app, name="batch")


@batch_app.command("run")
def batch_run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS", exists=True, dir_okay=False, help="A file for OpenAI's Batch API."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Default: REQUESTS.output.jsonl; errors go beside it.")
    ] = None,
    model: options.ServedModel = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            callback=between(0.0, YEAR_S / 3600),
            help="Hours; what has not ended by then is expired.",
        ),
    ] = None,
    cancel: options.CancelRun = False,
    worker_option: options.WorkerOption = None,
    quiet: options.Quiet = False,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """Run a batch file; after an interruption, run the same again."""
    check_options(worker_option)
    target = out or source.with_name(f"{source.stem}.output.jsonl")
    with run.reported(target), contextlib.ExitStack() as stack:
        batch = BatchFile(source, target, served_name(model) if model else None)
        count = batch.check()
        if within is not None:
            batch.deadline = time.time() + 3600 * within
        wanted = model or next(iter(sorted(batch.models())), None)
        url, metrics_url = run.server(stack, redis_url, queue, wanted, worker_option or [], quiet)
        if wanted is None:
            batch.model = default_model(url, queue)
        producer = stack.enter_context(Producer(url, queue=queue))
        if cancel:
            say(f"{batch.cancel(producer):,} requests cancelled")
            summary = batch.deliver(producer)
        else:
            bar = stack.enter_context(RunBar(count, metrics_url, is_quiet=quiet))
            summary = batch.execute(producer, bar.update)
    if as_json:
        typer.echo(json.dumps({"output": str(target), "errors": str(batch.errors_path), **asdict(summary)}))
    else:
        typer.echo(f"{summary.completed:,} of {summary.total:,} requests completed: {target}")
    if summary.failed:
        codes = ", ".join(f"{code} {n:,}" for code, n in sorted(summary.codes.items()))
        say(f"{summary.failed:,} failed ({codes}): {batch.errors_path}")
        raise typer.Exit(run.EXIT_FAILED_ROWS)


BatchId = Annotated[
    str, typer.Argument(metavar="ID", callback=checked(keys.Id), help="What `submit_many` returned.")
]


@batch_app.command("list")
def batch_list(
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="The latest ones.")] = 50,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """The batches of the queue, the latest first."""
    with Producer(redis_url, queue=queue) as producer:
        found = list(islice(producer.batches(), limit))
    if as_json:
        typer.echo(json.dumps([info.model_dump() for info in found]))
        return
    rows = [
        (info.id, views.ago(info.created_at), info.counts.total, *(getattr(info.counts, s) for s in _STATES))
        for info in found
    ]
    if rows:
        views.print_rows(("batch", "created", "jobs", *_STATES), rows)
    else:
        say(f"queue {queue} has no batches")


@batch_app.command("status")
def batch_status(
    batch_id: BatchId, redis_url: RedisUrl = None, queue: Queue = "default", as_json: AsJson = False
) -> None:
    """How many jobs of a batch are in which state."""
    with Producer(redis_url, queue=queue) as producer:
        counts = producer.batch(batch_id).counts()
    if as_json:
        typer.echo(json.dumps({"id": batch_id, **counts.model_dump(), "done": counts.done}))
        return
    ended = f"{counts.ended:,} of {counts.total:,} ended"
    states = [(state, f"{getattr(counts, state):,}") for state in _STATES if getattr(counts, state)]
    views.print_rows((), [("batch", batch_id), ("jobs", ended), *states])


@batch_app.command("cancel")
def batch_cancel(batch_id: BatchId, redis_url: RedisUrl = None, queue: Queue = "default") -> None:
    """Stop the jobs of a batch that have not ended. What has ended stays."""
    with Producer(redis_url, queue=queue) as producer:
        handle = producer.batch(batch_id)
        handle.counts()  # an unknown batch is an error, not one without jobs
        stopped = handle.cancel()
    say(f"{stopped:,} jobs of batch {batch_id} are cancelled, or will be within a moment")


@batch_app.command("results")
def batch_results(
    batch_id: BatchId,
    ordered: Annotated[bool, typer.Option("--ordered", help="In the order of the submits.")] = False,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="CURSOR",
            callback=checked(Cursor),
            help="Only what comes after this line's cursor.",
        ),
    ] = None,
    timeout: Timeout = None,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
) -> None:
    """Print each end as a line of JSON, until all have ended.

    `--timeout 0` prints what is there.
    """
    with Producer(redis_url, queue=queue) as producer:
        try:
            for item in producer.batch(batch_id).results(ordered=ordered, after=after, timeout=timeout):
                typer.echo(item.model_dump_json())
        except KeyboardInterrupt:
            say(
                f"\nthe batch goes on: pagemill batch results {batch_id}, or pagemill batch cancel {batch_id}"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
