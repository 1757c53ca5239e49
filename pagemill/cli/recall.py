"""`pagemill recall list | run | auto | keep`: what deviating workers committed, and what becomes of it.

Exit codes of `run`: 0 all results were replaced or no longer exist, 1 some stay, 4 a job can't run again now.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, Patience, Report, command_group, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options
from pagemill.cli.verify import EXIT_NO_VERDICT
from pagemill.producer.client.replay import recall
from pagemill.producer.client.replay.flow import ReplayOptions
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import audit
from pagemill.producer.wire.calls.audit import Accused
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import ResultTimeout, Unverifiable

recall_app = command_group("recall", "Recall results of workers that deviated from the others.")

_COLUMNS = ("worker", "state", "jobs", "since", "accused", "reason")


class OneWorker(Options):
    worker_id: Annotated[keys.Id, typer.Argument(metavar="WORKER")]
    """Worker id, as `recall list` prints it."""


class RecallOptions(Options):
    any_worker: bool = False
    """Allow workers with another fingerprint."""


class AutoOptions(Options):
    every: Annotated[float, between(0.1, 86_400.0)] = 10.0
    """Seconds between two updates."""


@recall_app.command("list")
def recall_list(at: Report) -> None:
    """List the workers whose canary deviates."""
    found = at.run(audit.accused(at.queue))
    now = at.now()
    rows = [_row(one, now) for one in found]
    at.print([one.model_dump() for one in found], rows, _COLUMNS, none="no worker deviates")


@recall_app.command("run")
def recall_run(worker: OneWorker, flags: RecallOptions, patience: Patience, at: Report) -> None:
    """Run a worker's jobs again on other workers, and replace their results.

    Can be repeated after an interruption: each result is replaced once. Jobs without a kept input are left.
    """
    _find(at, worker.worker_id)
    with at.producer() as producer:
        try:
            left = _recall(at, producer, worker.worker_id, patience.timeout, **vars(flags))
        except (Unverifiable, ResultTimeout) as error:
            print_stderr(f"{error}; repeat the command once it can run")
            raise typer.Exit(EXIT_NO_VERDICT) from None
    if left:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


@recall_app.command("auto")
def recall_auto(flags: AutoOptions, at: Report) -> None:
    """Recall the results of every quarantined worker.

    Runs until it is interrupted. Several may run at once.
    """
    with at.producer() as producer:
        while True:
            for one in at.run(audit.accused(at.queue)):
                if one.state == "quarantined":
                    try:
                        _recall(at, producer, one.worker, flags.every)
                    except (Unverifiable, ResultTimeout) as error:
                        print_stderr(f"{one.worker}: {error}; it is tried again")
            time.sleep(flags.every)


@recall_app.command("keep")
def recall_keep(worker: OneWorker, at: Report) -> None:
    """Keep the results, and let the worker pull jobs again.

    The workers then agree on the canaries' output from the start."""
    with at.producer() as producer:
        is_kept = producer.run_flow(recall.keep(producer.queue, worker.worker_id))
    if not is_kept:
        raise _unknown(worker.worker_id)
    if at.as_json:
        typer.echo(json.dumps({"worker": worker.worker_id, "kept": True}))


def _recall(
    at: Report, producer: Producer, worker_id: str, timeout: float | None, *, any_worker: bool = False
) -> int:
    """Print the outcome of each job; return the number of remaining results. Raises Unverifiable or ResultTimeout."""
    options = ReplayOptions(priority="normal", timeout=timeout, any_worker=any_worker, is_counted=False)
    outcomes = {"superseded": 0, "left": 0, "gone": 0}
    flow = recall.run(producer.queue, producer.preparer, worker_id, options)
    for recalled in producer.iterate_flow(flow):
        outcomes[recalled.outcome] += 1
        if at.as_json:
            typer.echo(recalled.model_dump_json())
        elif recalled.outcome == "left":
            typer.echo(f"{recalled.id}\tleft\t{recalled.reason or ''}")
    print_stderr(f"{worker_id}: " + ", ".join(f"{count:,} {word}" for word, count in outcomes.items()))
    return outcomes["left"]


def _find(at: Report, worker_id: str) -> None:
    if not any(one.worker == worker_id for one in at.run(audit.accused(at.queue))):
        raise _unknown(worker_id)


def _unknown(worker_id: str) -> typer.BadParameter:
    return typer.BadParameter(f"no worker {worker_id} deviates: see pagemill recall list")


def _row(one: Accused, now: float) -> tuple[object, ...]:
    jobs = f"{one.jobs} and earlier ones, not listed" if one.is_cut else str(one.jobs)
    since = "-" if one.clean_at is None else views.ago(one.clean_at, now)
    return one.worker, one.state, jobs, since, views.ago(one.accused_at, now), one.reason
