"""`pagemill workers`, `pagemill workers drain | pause | resume`: the live workers, and whether they pull jobs."""

from __future__ import annotations

import json
import secrets
import time
from typing import Annotated, Literal

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, Commands, Report, app, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between, checked
from pagemill.cli.terminal.grouped import grouped
from pagemill.producer.client.base import signing_keys
from pagemill.producer.wire.calls import adapters, registry
from pagemill.producer.wire.calls.adapters import WorkerCommand
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys

_POLL_S = 0.2
_ANSWER_S = 15.0
"""Seconds for a worker to obey."""
_SHOWN = 10

workers_app = Commands(
    invoke_without_command=True,
    rich_markup_mode=None,
    help="List the live workers; drain, pause or resume some.",
)
app.add_typer(workers_app, name="workers")

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID...", callback=checked(keys.Id), help="Ids of workers, or prefixes of ids."),
]
All = Annotated[bool, typer.Option("--all", help="All live workers of the queue.")]
Patience = Annotated[
    float,
    typer.Option("--timeout", callback=between(0.1, 86_400.0), help="Maximum seconds to wait."),
]


@workers_app.callback()
@grouped
def workers(context: typer.Context, at: Report) -> None:
    """List the live workers; drain, pause or resume some."""
    if context.invoked_subcommand is not None:
        return
    found, now = at.run(registry.workers(at.queue)), at.now()
    command = f"pagemill worker --model smollm2 --queue {at.queue}"
    at.print(
        [worker.model_dump() for worker in found],
        [views.worker_row(worker, now) for worker in found],
        views.WORKER_COLUMNS,
        none=f"no worker is alive on queue {at.queue}; start one: {command}",
    )


@workers_app.command("drain")
def workers_drain(at: Report, ids: Ids = None, every: All = False, timeout: Patience = 600.0) -> None:
    """Stop pulling, requeue running jobs, and wait until none is left.

    Running jobs may continue for the worker's grace period before they are requeued. The process stays: stop it, or
    let it continue with resume. Exit code 1: a worker is not drained.
    """
    _command(at, "drain", _chosen(at, ids, every), timeout)


@workers_app.command("pause")
def workers_pause(at: Report, ids: Ids = None, every: All = False, timeout: Patience = _ANSWER_S) -> None:
    """Stop pulling; running jobs finish. Exit code 1: a worker did not confirm."""
    _command(at, "pause", _chosen(at, ids, every), timeout)


@workers_app.command("resume")
def workers_resume(at: Report, ids: Ids = None, every: All = False, timeout: Patience = _ANSWER_S) -> None:
    """Pull jobs again after pause or drain. Exit code 1: a worker did not confirm."""
    _command(at, "resume", _chosen(at, ids, every), timeout)


def _chosen(at: Report, ids: list[str] | None, every: bool) -> list[str]:
    """Return the ids of the workers that are meant. Exits with a usage error if one is unknown."""
    if bool(ids) == every:
        raise typer.BadParameter("specify ids of workers, or --all")
    alive = at.run(registry.workers(at.queue))
    if every and not alive:
        raise typer.BadParameter(f"no worker is alive on queue {at.queue}")
    chosen = alive if every else [_found(at.queue, alive, start) for start in ids or ()]
    if loading := [one.id for one in chosen if one.state == "loading"]:
        raise typer.BadParameter(f"worker {loading[0]} is still loading; repeat the command once it is ready")
    return list(dict.fromkeys(one.id for one in chosen))


def _found(queue: str, alive: list[WorkerInfo], start: str) -> WorkerInfo:
    found = [one for one in alive if one.id == start] or [one for one in alive if one.id.startswith(start)]
    if not found:
        raise typer.BadParameter(
            f"no live worker of queue {queue} has an id that begins with {start[:100]!r}; "
            f"list them: pagemill workers --queue {queue}"
        )
    if len(found) > 1:
        names = ", ".join(one.id for one in found[:_SHOWN])
        raise typer.BadParameter(f"{start!r} is not unique: {names}; give more of the id")
    return found[0]


def _command(
    at: Report, action: Literal["drain", "pause", "resume"], names: list[str], timeout: float
) -> None:
    command = WorkerCommand(id=secrets.token_hex(12), action=action)
    at.run(adapters.send_command(at.queue, names, command, signing_keys()))
    until = time.monotonic() + timeout
    outcomes: dict[str, dict[str, str | int | None]] = {}
    shown: dict[str, str] = {}
    while True:
        answers = at.run(adapters.answers(at.queue, command.id))
        alive = {one.id: one for one in at.run(registry.workers(at.queue))}
        for name in names:
            answer, info = answers.get(name), alive.get(name)
            error = answer.error if answer is not None else "no response"
            state = "gone" if info is None else info.state
            running = 0 if info is None else info.running
            if error is None and action == "drain" and state not in ("drained", "gone"):
                error = f"it still holds {running} jobs"
            outcomes[name] = {"state": state, "running": running, "error": error}
            line = f"{name}: {state}" + (f", {running} jobs" if running else "")
            if answer is not None and shown.get(name) != line and not at.as_json:
                shown[name] = line
                print_stderr(line)
        is_over = all(_is_over(action, outcome) for outcome in outcomes.values())
        if is_over or time.monotonic() >= until:
            break
        time.sleep(_POLL_S)
    failed = {name: outcome["error"] for name, outcome in outcomes.items() if outcome["error"] is not None}
    if at.as_json:
        typer.echo(json.dumps({"workers": outcomes}))
    else:
        for name, reason in failed.items():
            print_stderr(f"{name}: {reason}")
    if failed:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _is_over(action: str, outcome: dict[str, str | int | None]) -> bool:
    """Whether the registry shows the requested state, or no worker is left."""
    if outcome["state"] == "gone":
        return True
    wanted = {"drain": ("drained",), "pause": ("paused",), "resume": ("ready",)}[action]
    return outcome["error"] is None and outcome["state"] in wanted
