"""`pagemill up`: the workers of this host, a gateway and an exporter, under one supervisor."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from pagemill.cli.app import (
    EXIT_NOT_SUCCEEDED,
    EXIT_REDIS,
    EXIT_USAGE,
    AsJson,
    ReportingGroup,
    UsageError,
    app,
    check_url,
    say,
)
from pagemill.cli.processes.worker import pairs
from pagemill.cli.terminal.checked import LogFormat, LogLevel, checked
from pagemill.cli.terminal.grouped import grouped
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.clients import redacted
from pagemill.producer.wire.server.discovery import state_dir, with_credentials

if TYPE_CHECKING:
    from pagemill.supervisor.child import ChildSpec
    from pagemill.supervisor.devices import Group
    from pagemill.supervisor.ports import Ports
    from pagemill.supervisor.settings import UpSettings
    from pagemill.worker.embedded import EmbeddedServer

up_app = typer.Typer(
    cls=ReportingGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
    help="Run this host's workers, a gateway and an exporter.",
)
app.add_typer(up_app, name="up")

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        envvar="PAGEMILL_RUN_DIR",
        file_okay=False,
        metavar="DIRECTORY",
        help="Of its lock, state and socket. Default: up in the state directory.",
    ),
]


def _port(help: str) -> Any:
    return typer.Option(min=0, max=65535, help=help)


@dataclass(frozen=True, kw_only=True)
class UpFlags:
    context: typer.Context
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="PAGEMILL_UP_CONFIG",
            dir_okay=False,
            help="A TOML file; flags and variables come before it.",
        ),
    ] = None
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Workers on the CPU, which share its cores.")
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="0|1|2,3", help="Cards of each worker; all: a worker per card. Default: all there are."
        ),
    ] = None
    model: Annotated[str | None, typer.Option(envvar="PAGEMILL_MODEL", help="As of pagemill worker.")] = None
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEMILL_REDIS_URL", callback=check_url, help="Default: an embedded Valkey server."
        ),
    ] = None
    queue: Annotated[
        str | None,
        typer.Option(callback=checked(keys.QueueName), help="The queue to serve. Default: default."),
    ] = None
    http_host: Annotated[str | None, typer.Option(help="Of metrics and health. Default: 127.0.0.1.")] = None
    http_port: Annotated[
        int | None,
        _port("The first worker's, the others' follow. Default: from 9790, those that are free; 0: any."),
    ] = None
    gateway: Annotated[
        bool | None, typer.Option("--gateway/--no-gateway", help="With a gateway. Default: yes.")
    ] = None
    gateway_port: Annotated[int | None, _port("Default: 8000; 0: any that is free.")] = None
    exporter: Annotated[
        bool | None, typer.Option("--exporter/--no-exporter", help="With an exporter. Default: yes.")
    ] = None
    exporter_port: Annotated[int | None, _port("Default: 9791; 0: any that is free.")] = None
    log_format: Annotated[str | None, typer.Option(callback=checked(LogFormat), help="console or json.")] = (
        None
    )
    log_level: Annotated[
        str | None, typer.Option(callback=checked(LogLevel), help="debug, info, warning or error.")
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of the workers; may be repeated."),
    ] = None
    run_dir: RunDir = None


_NOT_SETTINGS = frozenset({"context", "config", "option", "run_dir"})


@up_app.callback()
@grouped
def up(given: UpFlags) -> None:
    # The group's own help is above.
    if given.context.invoked_subcommand is not None:
        return
    try:
        from pagemill.supervisor.run_directory import RunDirectory, RunDirectoryError
        from pagemill.supervisor.settings import SettingsError
        from pagemill.worker.embedded import EmbeddedServerError
    except ModuleNotFoundError as error:
        raise _incomplete(error) from None
    try:
        settings = _load(given)
        directory = RunDirectory(given.run_dir or state_dir() / "up")
        try:
            code = _run(given, settings, directory)
        finally:
            directory.close()
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    except RunDirectoryError as error:
        raise typer.BadParameter(f"--run-dir: {error}") from None
    except EmbeddedServerError as error:
        say(str(error))
        raise typer.Exit(EXIT_REDIS) from None
    raise typer.Exit(code)


def _incomplete(error: ModuleNotFoundError) -> typer.Exit:
    say(f"{error.name} is missing; it takes what a worker takes: pip install 'pagemill[worker,gateway]'")
    return typer.Exit(EXIT_USAGE)


def _load(given: UpFlags) -> UpSettings:
    from pagemill.supervisor.settings import UpSettings

    flags = {
        field.name: getattr(given, field.name) for field in fields(given) if field.name not in _NOT_SETTINGS
    }
    if flags["gateway"]:
        flags["gateway"] = None  # the default, and a table may say more
    if flags["exporter"]:
        flags["exporter"] = None
    return UpSettings.load(given.config, flags, pairs(given.option or []))


def _run(given: UpFlags, settings: UpSettings, directory: Any) -> int:
    from pagemill.monitoring.logging import configure_logging
    from pagemill.supervisor import layout
    from pagemill.supervisor.logs import LogStream
    from pagemill.supervisor.notify import ServiceManager
    from pagemill.supervisor.ports import Ports
    from pagemill.supervisor.supervisor import Fleet, Supervisor

    groups = layout.worker_groups(settings)
    logs = LogStream(sys.stderr.buffer, settings.log_format, width=len(f"worker-{len(groups) - 1}"))
    configure_logging(settings.log_level, settings.log_format, stream=logs.writer("up"))  # type: ignore[arg-type]
    patience = layout.patience(settings)
    directory.end_leftovers(patience.stop_s)
    ports = Ports.choose(settings, len(groups))
    _checked(settings, groups, ports, "")  # before a server is started for them
    with _redis(settings) as (url, server):

        def describe() -> Sequence[ChildSpec]:
            return _checked(_load(given), groups, ports, url)

        fleet = Fleet(
            specs=_checked(settings, groups, ports, url),
            patience=patience,
            describe=describe,
            facts={"queue": settings.queue, "redis": redacted(url), "run_dir": str(directory.path)},
        )
        return Supervisor(fleet, directory, logs, ServiceManager(), server).run()


def _checked(settings: UpSettings, groups: Sequence[Group], ports: Ports, url: str) -> Sequence[ChildSpec]:
    """Describe the children, and let their commands parse what they will be given. Raises SettingsError."""
    from pagemill.supervisor import layout
    from pagemill.supervisor.settings import SettingsError

    found = layout.specs(settings, groups, ports, url)
    commands: Mapping[str, Any] = getattr(get_command(app), "commands", {})
    for spec in found:
        if spec.kind != "worker":
            try:
                commands[spec.kind].make_context(spec.kind, list(spec.arguments[1:]))
            except UsageError as error:
                raise SettingsError(f"{spec.kind}: {error.format_message()}") from None
    return found


@contextlib.contextmanager
def _redis(settings: UpSettings) -> Iterator[tuple[str, EmbeddedServer | None]]:
    """Yield the server's URL: the given one, or that of an embedded server that lives as long as this process."""
    from pagemill.worker.embedded import EmbeddedServer

    if settings.redis_url is not None:
        yield with_credentials(settings.redis_url), None
        return
    with EmbeddedServer.open(Path(settings.state_dir) if settings.state_dir else state_dir()) as server:
        yield server.url, server


@up_app.command()
def status(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Show the children: state, process, port, cards. Exit code 1: none runs here, or not all are ready."""
    (document,) = _ask(run_dir, command="status")
    if as_json:
        typer.echo(json.dumps(document))
    else:
        say(f"{document['state']}; queue {document['queue']} at {document['redis']}")
        for member in document["members"]:
            typer.echo("\t".join(_described(member)))
    if document["state"] != "ready":
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _described(member: Mapping[str, Any]) -> list[str]:
    state = member["state"]
    if state == "waiting":
        state += f", next start in {member['next_start_s']:.0f} s after {member['last_end']}"
    since_s = max(0.0, time.time() - member["since"])
    has = f"cards {','.join(member['devices'])}" if member["devices"] else ""
    if member["threads"]:
        has = f"{member['threads']} threads"
    return [member["name"], state, f"{since_s:.0f} s", f"pid {member['pid'] or '-'}", member["url"], has]


@up_app.command()
def restart(run_dir: RunDir = None) -> None:
    """Restart one after the other, with the settings of now."""
    for reply in _ask(run_dir, command="restart"):
        if "event" in reply:
            say(reply["event"])
        if "ok" in reply:
            if reply["ok"]:
                return
            break
    raise typer.Exit(EXIT_NOT_SUCCEEDED)


@up_app.command()
def stop(
    run_dir: RunDir = None,
    now: Annotated[bool, typer.Option("--now", help="Hand running jobs back at once.")] = False,
) -> None:
    """Drain all children and end; returns once they are gone."""
    for reply in _ask(run_dir, command="stop", now=now):
        say(reply["event"])
    from pagemill.supervisor.control import NotRunning, ask

    with contextlib.suppress(NotRunning):
        while True:
            list(ask(run_dir or state_dir() / "up", command="status"))
            time.sleep(0.2)


def _ask(run_dir: Path | None, **command: Any) -> Iterator[dict[str, Any]]:
    try:
        from pagemill.supervisor.control import NotRunning, ask
    except ModuleNotFoundError as error:
        raise _incomplete(error) from None
    try:
        yield from ask(run_dir or state_dir() / "up", **command)
    except NotRunning as error:
        say(f"{error}; start one: pagemill up --model smollm2")
        raise typer.Exit(EXIT_NOT_SUCCEEDED) from None
