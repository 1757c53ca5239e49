"""`pagemill dead list | show | replay | purge`: jobs that used up their attempts, or kept killing workers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Annotated

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, AsJson, JobId, Queue, RedisUrl, app, say
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import checked
from pagemill.error_codes import ErrorCode
from pagemill.producer.client.dead_letter_flow import Replay, submitted_fields
from pagemill.producer.client.preparer import check_id
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls.dead_letters import DeadLetter, OpenedLetter
from pagemill.producer.wire.schema import keys

dead_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Jobs that used up their attempts, or killed workers.",
)
app.add_typer(dead_app, name="dead")

Error = Annotated[
    str | None,
    typer.Option(
        "--error",
        metavar="CODE",
        callback=checked(ErrorCode),
        help="Only letters of this error code, or of this cause.",
    ),
]
JobIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", callback=checked(keys.Id), help="Dead jobs.")
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the queue.")]


@dead_app.command("list")
def dead_list(
    error: Error = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10**6, help="Letters at most.")] = 100,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """The dead letters, the latest death first. Shows no prompt and no output."""
    with Producer(redis_url, queue=queue) as producer:
        letters = list(itertools.islice(producer.dead_letters().list(error), limit + 1))
    if as_json:
        typer.echo(json.dumps([letter.model_dump() for letter in letters[:limit]]))
    else:
        _print_letters(letters[:limit])
    if len(letters) > limit:
        say(f"there are more than {limit}; see them with --limit")


@dead_app.command("show")
def dead_show(
    job_id: JobId, redis_url: RedisUrl = None, queue: Queue = "default", as_json: AsJson = False
) -> None:
    """One dead letter, with its prompt. Why it died, the job as submitted, and what had been generated."""
    with Producer(redis_url, queue=queue) as producer:
        opened = producer.dead_letters().show(check_id(job_id))
    if as_json:
        typer.echo(json.dumps(_document(opened)))
    else:
        views.print_fields(_document(opened))


@dead_app.command("replay")
def dead_replay(
    job_ids: JobIds = None,
    error: Error = None,
    every: All = False,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """Submit dead jobs again, as new jobs. Each once, however often this is run.

    Exit code 1: some could not be.
    """
    ids = _chosen(job_ids, error, every)
    with Producer(redis_url, queue=queue) as producer:
        done = producer.dead_letters().replay(ids, error=error)
    _print_replay(done, as_json)
    if done.refused:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


@dead_app.command("purge")
def dead_purge(
    job_ids: JobIds = None,
    error: Error = None,
    every: All = False,
    replayed: Annotated[bool, typer.Option("--replayed", help="Only letters that were replayed.")] = False,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """Forget dead letters for good."""
    ids = _chosen(job_ids, error, every or replayed)
    with Producer(redis_url, queue=queue) as producer:
        purged = producer.dead_letters().purge(ids, error=error, replayed=replayed)
    if as_json:
        typer.echo(json.dumps({"purged": purged}))
    else:
        say(f"{purged} dead letters of queue {queue} are forgotten")


def _chosen(job_ids: list[str] | None, error: str | None, every: bool) -> list[str] | None:
    """Return the ids to act on, None for the whole queue; a usage error unless the choice is clear."""
    if job_ids and (error or every):
        raise typer.BadParameter("give ids, or choose by --error, --all or --replayed; not both")
    if not (job_ids or error or every):
        raise typer.BadParameter("say which: ids, --error CODE, or --all")
    return [check_id(job_id) for job_id in job_ids] if job_ids else None


def _print_letters(letters: list[DeadLetter]) -> None:
    columns = (
        "job",
        "error",
        "cause",
        "attempts",
        "crashes",
        "model",
        "tenant",
        "died",
        "replayed as",
        "message",
    )
    rows = [
        (
            letter.id,
            letter.code,
            letter.cause,
            letter.attempts,
            letter.crashes,
            letter.model,
            letter.tenant,
            views.ago(letter.died_at),
            letter.replayed_as or "",
            letter.message,
        )
        for letter in letters
    ]
    if rows:
        views.print_rows(columns, rows)
    else:
        say("no dead letters")


def _print_replay(done: Replay, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    for dead_id, job_id in done.jobs.items():
        typer.echo(f"{dead_id}\t{job_id}")
    if done.already:
        say(f"{len(done.already)} were replayed before, or run already under their idempotency key")
    for dead_id, reason in done.refused.items():
        say(f"job {dead_id} can't be replayed: {reason}")
    say(f"{len(done.jobs)} jobs run again")


def _document(opened: OpenedLetter) -> dict[str, object]:
    partial = [output.model_dump() for output in opened.partial]
    return opened.letter.model_dump() | {
        "job": submitted_fields(opened.payload, opened.letter.id),
        "partial": partial,
    }
