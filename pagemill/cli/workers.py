"""`pagemill workers`, `pagemill workers drain | pause | resume`: the live workers, and whether they pull jobs."""

from __future__ import annotations

import json
import secrets
import time
from typing import Annotated, Literal

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, Commands, Report, app, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options, grouped
from pagemill.producer.client.base import signing_keys
from pagemill.producer.wire.calls import adapters, registry
from pagemill.producer.wire.calls.adapters import WorkerCommand
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys

_POLL_S = 0.2
_SHOWN = 10

workers_app = Commands(
    invoke_without_command=True,
    rich_markup_mode=None,
    help="List the live workers; drain, pause or resume some.",
)
app.add_typer(workers_app, name="workers")

Timeout = Annotated[float, between(0.1, 86_400.0), typer.Option(help="Maximum seconds to wait.")]


class Chosen(Options):
    ids: Annotated[list[keys.Id] | None, typer.Argument(metavar="ID...")] = None
    """Ids of workers, or prefixes of ids."""
    every: Annotated[bool, typer.Option("--all")] = False
    """All live workers of the queue."""
    timeout: Timeout = 15.0


class Drained(Chosen):
    timeout: Timeout = 600.0


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
def workers_drain(chosen: Drained, at: Report) -> None:
    """Stop pulling, requeue running jobs, and wait until none is left.

    Running jobs may continue for the worker's grace period before they are requeued. The process stays: stop it, or
    let it continue with resume. Exit code 1: a worker is not drained.
    """
    _command(at, "drain", chosen)


@workers_app.command("pause")
def workers_pause(chosen: Chosen, at: Report) -> None:
    """Stop pulling; running jobs finish. Exit code 1: a worker did not confirm."""
    _command(at, "pause", chosen)


@workers_app.command("resume")
def workers_resume(chosen: Chosen, at: Report) -> None:
    """Pull jobs again after pause or drain. Exit code 1: a worker did not confirm."""
    _command(at, "resume", chosen)


def _names(at: Report, flags: Chosen) -> list[str]:
    """Return the ids of the workers that are meant. Exits with a usage error if one is unknown."""
    if bool(flags.ids) == flags.every:
        raise typer.BadParameter("specify ids of workers, or --all")
    alive = at.run(registry.workers(at.queue))
    if flags.every and not alive:
        raise typer.BadParameter(f"no worker is alive on queue {at.queue}")
    chosen = alive if flags.every else [_found(at.queue, alive, start) for start in flags.ids or ()]
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


def _command(at: Report, action: Literal["drain", "pause", "resume"], flags: Chosen) -> None:
    names = _names(at, flags)
    command = WorkerCommand(id=secrets.token_hex(12), action=action)
    at.run(adapters.send_command(at.queue, names, command, signing_keys()))
    until = time.monotonic() + flags.timeout
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
