"""`pagemill tenant purge`: remove all that a queue has of one tenant, and prove it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer
from pydantic import AfterValidator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, Report, command_group, print_stderr
from pagemill.cli.terminal.checked import YEAR_S, between
from pagemill.cli.terminal.options import Options
from pagemill.producer.client.purge.erasers import ERASERS
from pagemill.producer.client.purge.report import PurgeOptions, PurgeProgress, PurgeReport
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema import keys

SHOWN = 20
"""Leftovers that are printed; `--json` has all."""
PHASES = {
    "look": "looking for jobs",
    "jobs": "removing jobs",
    "wait": "waiting for jobs that run",
    "rest": "removing the rest",
    "prove": "searching all keys",
}

tenant_app = command_group("tenant", "Manage the data of one tenant of a queue.")


def _eraser(name: str) -> str:
    names = [eraser.name for eraser in ERASERS]
    if name not in names:
        raise ValueError(f"should be {' or '.join(names)}")
    return name


@tenant_app.callback()
def _tenant() -> None:
    """Manage the data of one tenant of a queue."""


class TenantOptions(Options):
    tenant: Annotated[keys.TenantName, typer.Argument(metavar="TENANT")]
    """Name of the tenant."""
    dry_run: bool = False
    """Count the data without deleting it."""
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False
    """Do not ask for confirmation."""
    also: Annotated[
        list[Annotated[str, AfterValidator(_eraser)]] | None,
        typer.Option(
            metavar="WHAT",
            help=f"Further data to remove: {', '.join(eraser.name for eraser in ERASERS)}; may be repeated.",
        ),
    ] = None
    wait: Annotated[float, between(0.0, YEAR_S)] = 30.0
    """Seconds to wait for running jobs before they are deleted too."""


@tenant_app.command("purge")
def tenant_purge(at: Report, options: TenantOptions) -> None:
    """Delete all data of a tenant, and verify it by a search of all keys.

    Exit code 1: something is left; the output says where.
    """
    with at.producer() as producer:
        if not (options.yes or options.dry_run):
            _confirm(producer, options)
        report = _purged(producer, options, options.dry_run)
    if at.as_json:
        typer.echo(json.dumps(dataclasses.asdict(report) | {"proven": report.is_proven}))
    else:
        _print(report)
    if report.remains:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _confirm(producer: Producer, options: TenantOptions) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("not a terminal: confirm with --yes, or look with --dry-run")
    print_stderr(_summary(_purged(producer, options, dry_run=True)))
    if not typer.confirm(f"Remove all of that from queue {producer.queue} permanently?", err=True):
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _purged(producer: Producer, options: TenantOptions, dry_run: bool) -> PurgeReport:
    wanted = PurgeOptions(wait_s=options.wait, also=frozenset(options.also or ()), dry_run=dry_run)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: PurgeProgress) -> None:
            bar.update(
                task,
                description=PHASES[progress.phase],
                completed=progress.done,
                total=progress.total or None,
            )

        return producer.purge_tenant(options.tenant, wanted, on_progress=show)


def _summary(report: PurgeReport) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in report.jobs.items())
    return (
        f"tenant {report.tenant} of queue {report.queue}: {sum(report.jobs.values()):,} jobs"
        f"{f' ({states})' if states else ''}, {report.batches:,} batches, {report.files:,} files and "
        f"{report.api_batches:,} batches of the gateway"
    )


def _print(report: PurgeReport) -> None:
    print_stderr(_summary(report))
    if report.dry_run:
        print_stderr("nothing was changed")
        return
    if report.forced:
        print_stderr(f"{report.forced:,} jobs still ran; the writes of their workers are rejected")
    if report.stored_files:
        print_stderr(f"{report.stored_files:,} files of the store were deleted")
    for name, count in report.erased.items():
        print_stderr(f"{name}: {count:,} removed")
    for name in report.kept:
        print_stderr(f"{name}: kept; remove with --also {name}")
    for leftover in report.remains[:SHOWN]:
        print_stderr(f"left: {leftover.names} in the {leftover.where} of {leftover.key}")
    if report.remains:
        print_stderr(
            f"{len(report.remains):,} keys still name the tenant or its jobs; run this again, or look at them"
        )
    else:
        print_stderr(f"everything is removed: {report.keys_looked_at:,} keys were searched")
