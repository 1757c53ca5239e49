"""`pagemill rollout start | raise | halt | rollback | finish | status | compare`: a new revision of a model.

Exit codes of `compare`: 0 all that could be compared agreed, 1 some did not, 4 nothing could be compared; of the
others 0, or 1 where they are rejected.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, AtQueue, Patience, Report, command_group, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options
from pagemill.cli.verify import EXIT_NO_VERDICT, detail
from pagemill.producer.client.replay.verification import Verification
from pagemill.producer.client.rollout.handles import ModelRollout
from pagemill.producer.wire.calls.rollouts import (
    DEFAULT_LEAST,
    DEFAULT_MARGIN,
    MAX_LEAST,
    By,
    Rollout,
    RolloutStatus,
    parse_share,
    statuses,
)
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import RolloutRefused

rollout_app = command_group("rollout", "Run a share of a model's jobs on a new revision.")

_WORDS = {
    "open": "open",
    "halted": "halted: no new jobs for the canary",
    "back": "rolled back",
    "ended": "ended: run finish again",
}


def _share(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_share(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


class OneModel(Options):
    model: Annotated[keys.ModelName, typer.Argument(metavar="MODEL")]
    """Served name of the model."""


class CanaryShare(Options):
    share: Annotated[str, typer.Option(callback=_share, metavar="SHARE")]
    """Share of the canary, such as 5% or 0.05."""


class StartOptions(CanaryShare):
    to: Annotated[keys.PinnedRevision, typer.Option(metavar="REV")]
    """Revision of the canary, as `pagemill workers` prints it."""
    by: By = "id"
    """Unit of the decision: a job's id, its tenant or its batch."""
    margin: Annotated[str, typer.Option("--halt-margin", callback=_share, metavar="SHARE")] = (
        f"{DEFAULT_MARGIN:.0%}"
    )
    """Difference of the failure rates of canary and stable side above which the rollout halts; 100%: never."""
    least: Annotated[int, between(1, MAX_LEAST), typer.Option("--halt-after")] = DEFAULT_LEAST
    """Number of executions of the canary before a halt."""
    force: bool = False
    """Start the rollout even if no live worker announces the revision."""


class StatusOptions(Options):
    model: Annotated[keys.ModelName | None, typer.Argument(metavar="[MODEL]")] = None
    """Model. Default: all."""


class CompareOptions(Options):
    sample: Annotated[int, between(1, 200)] = 50
    """Maximum number of jobs of the canary."""
    revision: Annotated[keys.PinnedRevision | None, typer.Option("--with", metavar="REV")] = None
    """Revision that runs them again. Default: that of the stable side."""


@rollout_app.command()
def start(of: OneModel, flags: StartOptions, at: Report) -> None:
    """Start a rollout: a revision gets a share of the model's jobs."""
    wanted = Rollout(flags.to, parse_share(flags.share), flags.by, parse_share(flags.margin), flags.least)
    with _rollout(at, of.model) as rollout:
        _print([rollout.start(wanted, force=flags.force)], at.as_json)


@rollout_app.command("raise")
def raise_share(of: OneModel, flags: CanaryShare, at: Report) -> None:
    """Change the share of the canary. A halted rollout resumes."""
    with _rollout(at, of.model) as rollout:
        _print([rollout.set_share(parse_share(flags.share))], at.as_json)


@rollout_app.command()
def halt(of: OneModel, at: Report) -> None:
    """Stop new jobs of the canary until `raise`. It finishes its running jobs."""
    with _rollout(at, of.model) as rollout:
        _print([rollout.halt()], at.as_json)


@rollout_app.command()
def rollback(of: OneModel, at: Report) -> None:
    """End the canary: it gets no more jobs. Stop its workers, then run `finish`."""
    with _rollout(at, of.model) as rollout:
        _print([rollout.roll_back()], at.as_json)


@rollout_app.command()
def finish(of: OneModel, at: AtQueue) -> None:
    """End the rollout: all workers pull all jobs again."""
    with _rollout(at, of.model) as rollout:
        rollout.finish()
        print_stderr(f"the rollout of {of.model} is over")


@rollout_app.command()
def status(flags: StatusOptions, at: Report) -> None:
    """Print both sides of the rollout.

    Workers, executions, failures, seconds from pull to commit, what waits, and agreement.
    """
    found = []
    for name in [flags.model] if flags.model else [one.model for one in at.run(statuses(at.queue))]:
        with _rollout(at, name) as rollout:
            found.append(rollout.status())
    _print(found, at.as_json)


@rollout_app.command()
def compare(of: OneModel, flags: CompareOptions, patience: Patience, at: Report) -> None:
    """Compare the outputs of canary and stable revision. Runs jobs of the canary on the stable one.

    Those whose outputs differ are printed, with the first difference. Exit code 1: some do; 4: none could be compared.
    """
    agreed = compared = num_reported = 0
    with _rollout(at, of.model) as rollout:
        for found in rollout.compare(**vars(flags), **vars(patience)):
            compared += found.exactness is not None
            agreed += found.exactness not in (None, "neither")
            num_reported += 1
            _print_comparison(found, at.as_json)
    print_stderr(
        f"{agreed} of {compared} outputs agree"
        + (f" ({num_reported - compared} not compared)" if num_reported > compared else "")
    )
    if agreed < compared:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)
    if not compared:
        raise typer.Exit(EXIT_NO_VERDICT)


def _print_comparison(found: Verification, as_json: bool) -> None:
    if as_json:
        typer.echo(found.model_dump_json())
    elif found.exactness in (None, "neither"):
        typer.echo(f"{found.id}\t{'differs' if found.exactness else 'not compared'}\t{detail(found)}")


@contextmanager
def _rollout(at: AtQueue, model: str) -> Iterator[ModelRollout]:
    with at.producer() as producer:
        try:
            yield producer.rollout(model)
        except RolloutRefused as error:
            print_stderr(str(error))
            raise typer.Exit(EXIT_NOT_SUCCEEDED) from None


def _print(found: list[RolloutStatus], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_document(one) for one in found]))
        return
    if not found:
        print_stderr("there is no rollout")
    for one in found:
        word = _WORDS[one.state] + (" (it failed too often)" if one.halted_for else "")
        print_stderr(f"{one.model}: {100 * one.share:.4g}% of the jobs, by {one.by}, to {one.to}; {word}")
        views.print_rows(("side", *_COLUMNS), [_row(side, one) for side in ("stable", "canary")])
        if one.compared:
            print_stderr(f"{one.agreed} of {one.compared} outputs agree")


_COLUMNS = ("workers", "executions", "failures", "rate", "p50 s", "p90 s", "waiting", "oldest s")


def _row(side: str, status: RolloutStatus) -> tuple[object, ...]:
    figures = status.canary if side == "canary" else status.stable
    p50, p90 = ("" if run is None else f"{run:.3g}" for run in (figures.run_p50_s, figures.run_p90_s))
    rate = f"{figures.failure_rate:.1%}" if figures.jobs else ""
    return (
        side,
        figures.workers,
        figures.jobs,
        figures.failures,
        rate,
        p50,
        p90,
        figures.waiting,
        round(figures.oldest_s),
    )


def _document(status: RolloutStatus) -> dict[str, Any]:
    document = dataclasses.asdict(status)
    for side in ("stable", "canary"):
        document[side]["failure_rate"] = getattr(status, side).failure_rate
    return document
