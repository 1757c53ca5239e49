"""`pagemill up`: the workers of this host, a gateway and an exporter, under one supervisor."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from pagemill.cli.app import (
    EXIT_NOT_SUCCEEDED,
    EXIT_REDIS,
    EXIT_USAGE,
    Commands,
    Printing,
    ReportingGroup,
    UsageError,
    app,
    check_url,
    print_stderr,
)
from pagemill.cli.processes.worker import pairs
from pagemill.cli.terminal.options import Options, grouped
from pagemill.cli.terminal.setting_flags import SettingsHelp, options, settings_of
from pagemill.engine.models.echo import is_echo
from pagemill.producer.wire.server.clients import redacted
from pagemill.producer.wire.server.discovery import URL_VARIABLE, state_dir, with_credentials
from pagemill.supervisor.settings import SettingsError, UpSettings

if TYPE_CHECKING:
    from pagemill.supervisor.child import ChildSpec
    from pagemill.supervisor.devices import Group
    from pagemill.supervisor.ports import Ports
    from pagemill.supervisor.run_directory import RunDirectory
    from pagemill.worker.embedded import EmbeddedServer


class RunDirOptions(Options):
    run_dir: Annotated[
        Path | None, typer.Option(envvar="PAGEMILL_RUN_DIR", file_okay=False, metavar="DIRECTORY")
    ] = None
    """Directory of lock, state and socket. Default: up in the state directory."""

    @property
    def path(self) -> Path:
        return self.run_dir or state_dir() / "up"


_FIRST = (
    "workers", "devices", "model", "redis_url", "queue", "http_host", "http_port", "gateway", "gateway_port",
    "exporter", "exporter_port", "log_format", "log_level",
)  # fmt: skip
"""The settings that help shows first."""
_FLAGS = options(
    settings_of(UpSettings, without={"worker"}),
    {
        "model": {"envvar": "PAGEMILL_MODEL"},
        "redis_url": {"envvar": URL_VARIABLE, "callback": check_url},
        "state_dir": {"metavar": "DIRECTORY"},
        "devices": {"metavar": "0|1|2,3"},
    },
    first=_FIRST,
    is_checked=True,
)


class _UpGroup(SettingsHelp, ReportingGroup):
    """`pagemill up` and its subcommands."""


up_app = Commands(
    cls=_UpGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
    help="Run this host's workers, a gateway and an exporter.",
)
app.add_typer(up_app, name="up")


class UpOptions(Options):
    config: Annotated[Path | None, typer.Option(envvar="PAGEMILL_UP_CONFIG", dir_okay=False)] = None
    """A TOML file; flags and variables take precedence."""
    settings: Annotated[dict[str, Any], _FLAGS]
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None
    """Setting of the workers; may be repeated."""


class StopOptions(Options):
    now: bool = False
    """Requeue running jobs immediately."""


@up_app.callback()
@grouped
def up(context: typer.Context, flags: UpOptions, at: RunDirOptions) -> None:
    # The group's help is above.
    if context.invoked_subcommand is not None:
        return
    for name in ("gateway", "exporter"):
        if flags.settings.get(name):
            del flags.settings[name]  # the default, and a table of the file may set more
    try:
        loaded = UpSettings.load(flags.config, flags.settings, pairs(flags.option or []))
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        from pagemill.supervisor.run_directory import RunDirectory, RunDirectoryError
        from pagemill.worker.embedded import EmbeddedServerError
    except ModuleNotFoundError as error:
        raise _incomplete(error, loaded) from None
    try:
        directory = RunDirectory(at.path)
        try:
            code = _run(loaded, directory)
        finally:
            directory.close()
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    except RunDirectoryError as error:
        raise typer.BadParameter(f"--run-dir: {error}") from None
    except EmbeddedServerError as error:
        print_stderr(str(error))
        raise typer.Exit(EXIT_REDIS) from None
    raise typer.Exit(code)


def _incomplete(error: ModuleNotFoundError, settings: UpSettings | None = None) -> typer.Exit:
    """Print the extras that the children need; without settings those of any model, and of a gateway."""
    is_small = settings is not None and is_echo(settings.model or "")
    has_gateway = settings is None or settings.gateway is not False
    extras = ",".join(["echo" if is_small else "worker", *(["gateway"] if has_gateway else [])])
    print_stderr(f"{error.name} is missing; `pagemill up` needs: pip install 'pagemill[{extras}]'")
    return typer.Exit(EXIT_USAGE)


def _run(settings: UpSettings, directory: RunDirectory) -> int:
    from pagemill.monitoring.logging import configure_logging
    from pagemill.supervisor import layout
    from pagemill.supervisor.logs import LogStream
    from pagemill.supervisor.notify import ServiceManager
    from pagemill.supervisor.ports import Ports
    from pagemill.supervisor.supervisor import Fleet, Supervisor

    groups = layout.worker_groups(settings)
    logs = LogStream(sys.stderr.buffer, settings.log_format, width=len(f"worker-{len(groups) - 1}"))
    configure_logging(settings.log_level, settings.log_format, stream=logs.writer("up"))  # type: ignore[arg-type]
    timeouts = layout.timeouts(settings)
    directory.end_leftovers(timeouts.stop_s)
    ports = Ports.choose(settings, len(groups))
    _checked(settings, groups, ports, "")  # before a server is started for them
    with _redis(settings) as (url, server):
        fleet = Fleet(
            specs=_checked(settings, groups, ports, url),
            timeouts=timeouts,
            facts={"queue": settings.queue, "redis": redacted(url), "run_dir": str(directory.path)},
        )
        return Supervisor(fleet, directory, logs, ServiceManager(), server).run()


def _checked(settings: UpSettings, groups: Sequence[Group], ports: Ports, url: str) -> Sequence[ChildSpec]:
    """Describe the children, and validate their arguments with their commands. Raises SettingsError."""
    from pagemill.supervisor import layout

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
    """Yield the server's URL: the configured one, or that of an embedded server, which stops with this process."""
    from pagemill.worker.embedded import EmbeddedServer

    if settings.redis_url is not None:
        yield with_credentials(settings.redis_url), None
        return
    with EmbeddedServer.open(Path(settings.state_dir) if settings.state_dir else state_dir()) as server:
        yield server.url, server


@up_app.command()
def status(at: RunDirOptions, printing: Printing) -> None:
    """Print the children: state, process, port, GPUs. Exit code 1: none runs on this host, or not all are ready."""
    (document,) = _send(at.path, command="status")
    if printing.as_json:
        typer.echo(json.dumps(document))
    else:
        print_stderr(f"{document['state']}; queue {document['queue']} at {document['redis']}")
        for member in document["members"]:
            typer.echo("\t".join(_described(member)))
    if document["state"] != "ready":
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _described(member: Mapping[str, Any]) -> list[str]:
    state = member["state"]
    if state == "waiting":
        state += f", next start in {member['next_start_s']:.0f} s after {member['last_end']}"
    since_s = max(0.0, time.time() - member["since"])
    has = f"GPUs {','.join(member['devices'])}" if member["devices"] else ""
    if member["threads"]:
        has = f"{member['threads']} threads"
    return [member["name"], state, f"{since_s:.0f} s", f"pid {member['pid'] or '-'}", member["url"], has]


@up_app.command()
def stop(at: RunDirOptions, flags: StopOptions) -> None:
    """Drain and stop all children. Returns when they have exited."""
    for reply in _send(at.path, command="stop", now=flags.now):
        print_stderr(reply["event"])
    from pagemill.supervisor.control import NotRunning, send_command

    with contextlib.suppress(NotRunning):
        while True:
            list(send_command(at.path, command="status"))
            time.sleep(0.2)


def _send(run_dir: Path, **command: Any) -> Iterator[dict[str, Any]]:
    try:
        from pagemill.supervisor.control import NotRunning, send_command
    except ModuleNotFoundError as error:
        raise _incomplete(error) from None
    try:
        yield from send_command(run_dir, **command)
    except NotRunning as error:
        print_stderr(str(error))
        raise typer.Exit(EXIT_NOT_SUCCEEDED) from None
