"""`pagemill batch run`: files of OpenAI's Batch API. Exit codes as for `pagemill run`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pagemill.cli import options, run
from pagemill.cli.app import AsJson, Queue, RedisUrl, app, default_model, say
from pagemill.cli.checked import YEAR_S, between
from pagemill.cli.local_worker import served_name
from pagemill.cli.worker import check_options
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.openai.batch_file import BatchFile

batch_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="OpenAI Batch files.")
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
    """Run a batch file; run the same command again after any interruption."""
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
