"""`pagemill dead list | show | replay | purge`: jobs that used up their attempts, or kept killing workers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Annotated

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, OneJob, Report, command_group, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options
from pagemill.common.error_codes import ErrorCode
from pagemill.producer.client.dead_letter_flow import Replay, submitted_fields
from pagemill.producer.client.preparer import check_id
from pagemill.producer.wire.calls.dead_letters import DeadLetter, OpenedLetter
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.images import hide_images

dead_app = command_group("dead", "List, replay and purge dead jobs.")


class ErrorFilter(Options):
    error: Annotated[ErrorCode | None, typer.Option(metavar="CODE")] = None
    """Error code or cause of the dead letters."""


class ListOptions(ErrorFilter):
    limit: Annotated[int, between(1, 10**6)] = 100
    """Maximum number of dead letters."""


class Chosen(ErrorFilter):
    job_ids: Annotated[list[keys.Id] | None, typer.Argument(metavar="ID")] = None
    """Ids of dead jobs."""
    every: Annotated[bool, typer.Option("--all")] = False
    """Every dead letter of the queue."""

    def ids(self, *, replayed: bool = False) -> list[str] | None:
        """Return the ids to act on, None for the whole queue; a usage error unless the choice is clear."""
        is_filtered = self.error is not None or self.every or replayed
        if self.job_ids and is_filtered:
            raise typer.BadParameter(
                "job ids and the filters --error, --all and --replayed exclude each other"
            )
        if not (self.job_ids or is_filtered):
            raise typer.BadParameter("select dead letters by ids, --error CODE or --all")
        return [check_id(job_id) for job_id in self.job_ids] if self.job_ids else None


class PurgeOptions(Chosen):
    replayed: bool = False
    """Select dead letters that were replayed."""


@dead_app.command("list")
def dead_list(flags: ListOptions, at: Report) -> None:
    """List dead letters, the latest first, without prompts and outputs."""
    with at.producer() as producer:
        letters = list(itertools.islice(producer.dead_letters().list(flags.error), flags.limit + 1))
    now = at.now()
    shown = letters[: flags.limit]
    at.print(
        [letter.model_dump() for letter in shown],
        [_row(letter, now) for letter in shown],
        _COLUMNS,
        none="no dead letters",
    )
    if len(letters) > flags.limit:
        print_stderr(f"there are more than {flags.limit}; see them with --limit")


@dead_app.command("show")
def dead_show(job: OneJob, at: Report) -> None:
    """Print one dead letter. Shows the error, the job as submitted with its prompt, and the partial output."""
    with at.producer() as producer:
        opened = producer.dead_letters().show(check_id(job.job_id))
    if at.as_json:
        typer.echo(json.dumps(_document(opened)))
    else:
        views.print_fields(_document(opened))


@dead_app.command("replay")
def dead_replay(chosen: Chosen, at: Report) -> None:
    """Submit dead jobs again, as new jobs. Repeated calls submit each job once.

    Exit code 1: some could not be.
    """
    ids = chosen.ids()
    with at.producer() as producer:
        done = producer.dead_letters().replay(ids, error=chosen.error)
    _print_replay(done, at.as_json)
    if done.refused:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


@dead_app.command("purge")
def dead_purge(chosen: PurgeOptions, at: Report) -> None:
    """Delete dead letters permanently."""
    ids = chosen.ids(replayed=chosen.replayed)
    with at.producer() as producer:
        purged = producer.dead_letters().purge(ids, error=chosen.error, replayed=chosen.replayed)
    if at.as_json:
        typer.echo(json.dumps({"purged": purged}))
    else:
        print_stderr(f"{purged} dead letters of queue {at.queue} are forgotten")


_COLUMNS = (
    "job", "error", "cause", "attempts", "crashes", "model", "tenant", "died", "replayed as", "message",
)  # fmt: skip


def _row(letter: DeadLetter, now: float) -> tuple[object, ...]:
    return (
        letter.id, letter.code, letter.cause, letter.attempts, letter.crashes, letter.model, letter.tenant,
        views.ago(letter.died_at, now), letter.replayed_as or "", letter.message,
    )  # fmt: skip


def _print_replay(done: Replay, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    for dead_id, job_id in done.jobs.items():
        typer.echo(f"{dead_id}\t{job_id}")
    if done.already:
        print_stderr(f"{len(done.already)} were replayed before, or run already under their idempotency key")
    for dead_id, reason in done.refused.items():
        print_stderr(f"job {dead_id} can't be replayed: {reason}")
    print_stderr(f"{len(done.jobs)} jobs run again")


def _document(opened: OpenedLetter) -> dict[str, object]:
    partial = [output.model_dump() for output in opened.partial]
    job = json.dumps(submitted_fields(opened.payload, opened.letter.id))
    return opened.letter.model_dump() | {
        "job": json.loads(hide_images(job)),
        "partial": partial,
    }
