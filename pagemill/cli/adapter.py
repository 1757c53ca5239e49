"""`pagemill adapter add | list | remove`: the LoRA adapters of live workers."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Annotated

import typer

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, Report, command_group, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options
from pagemill.common.bounds import ADAPTER_NAME
from pagemill.producer.client import flows
from pagemill.producer.client.base import signing_keys
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import adapters, registry
from pagemill.producer.wire.calls.adapters import MAX_SOURCE, AdapterAnswer, WorkerCommand
from pagemill.producer.wire.schema.keys import AdapterName, ModelName

_POLL_S = 0.1
adapter_app = command_group("adapter", "Manage the LoRA adapters of live workers.")

Timeout = Annotated[
    float, between(0.1, 3600.0), typer.Option(help="Maximum seconds to wait for the workers.")
]


def _check_pair(pair: str) -> str:
    name, _, source = pair.partition("=")
    if not ADAPTER_NAME.fullmatch(name) or not 0 < len(source) <= MAX_SOURCE:
        raise typer.BadParameter(
            f"{pair[:100]!r} is not valid; write NAME=FOLDER, such as french=/models/french-lora"
        )
    return pair


class OneAdapter(Options):
    name: Annotated[AdapterName, typer.Argument(metavar="NAME")]
    """Name of the adapter in jobs."""


class Folder(Options):
    pair: Annotated[str, typer.Argument(metavar="NAME=FOLDER", callback=_check_pair)]
    """Name and folder of the adapter, as NAME=FOLDER on the workers' machines."""


class OfWorkers(Options):
    model: ModelName | None = None
    """Model whose workers load or remove it. Default: all."""
    timeout: Timeout = 60.0


class ListOptions(OfWorkers):
    timeout: Timeout = 10.0


@adapter_app.command("add")
def adapter_add(adapter: Folder, to: OfWorkers, at: Report) -> None:
    """Add an adapter to every live worker, or replace it. Exit code 1: a worker does not have it."""
    name, _, source = adapter.pair.partition("=")
    if Path(source).is_dir():
        source = os.path.abspath(source)
    _command(at, WorkerCommand(id=_id(), action="add", name=name, source=source), to)


@adapter_app.command("remove")
def adapter_remove(adapter: OneAdapter, of: OfWorkers, at: Report) -> None:
    """Remove an adapter from every live worker. Running jobs finish with it. Exit code 1: a worker still has it."""
    _command(at, WorkerCommand(id=_id(), action="remove", name=adapter.name), of)


@adapter_app.command("list")
def adapter_list(of: ListOptions, at: Report) -> None:
    """List the adapters of the live workers."""
    _command(at, WorkerCommand(id=_id(), action="list"), of)


def _id() -> str:
    return secrets.token_hex(12)


def _command(at: Report, command: WorkerCommand, of: OfWorkers) -> None:
    """Send it to each live worker, print each one's answer, and exit."""
    with at.producer() as producer:
        alive = [
            info
            for info in producer.run_flow(flows.call(registry.workers(at.queue)))
            if info.state != "loading" and (of.model is None or of.model in info.models)
        ]
        names = [info.id for info in alive]
        if not names:
            print_stderr(
                f"no worker of queue {at.queue}{f' that serves {of.model}' if of.model else ''} is ready"
            )
            raise typer.Exit(EXIT_NOT_SUCCEEDED)
        producer.run_flow(flows.call(adapters.send_command(at.queue, names, command, signing_keys())))
        answers = _wait(producer, command.id, names, of.timeout)
    _print(command, names, answers, at.as_json)
    if any((answer := answers.get(name)) is None or answer.error is not None for name in names):
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _wait(producer: Producer, command_id: str, names: list[str], timeout: float) -> dict[str, AdapterAnswer]:
    until = time.monotonic() + timeout
    while True:
        found = producer.run_flow(flows.call(adapters.answers(producer.queue, command_id)))
        if len(found) >= len(names) or time.monotonic() >= until:
            return found
        time.sleep(_POLL_S)


def _print(
    command: WorkerCommand, names: list[str], answers: dict[str, AdapterAnswer], as_json: bool
) -> None:
    silent = AdapterAnswer(error="no response")
    if as_json:
        flags = {name: answers.get(name, silent).model_dump() for name in names}
        typer.echo(json.dumps({"workers": flags}))
        return
    if command.action == "list":
        rows = [
            (one.name, one.rank, f"{one.num_bytes / 2**20:.1f} MiB", one.digest[:12], name, one.source)
            for name in names
            for one in answers.get(name, silent).adapters
        ]
        views.print_rows(("adapter", "rank", "memory", "digest", "worker", "folder"), rows)
    for name in names:
        answer = answers.get(name, silent)
        if answer.error is not None:
            print_stderr(f"{name}: {answer.error}")
        elif command.action != "list":
            typer.echo(f"{name}: {'added' if command.action == 'add' else 'removed'} {command.name}")
