"""`pagemill gateway`: OpenAI's HTTP interface in front of the queue, and `pagemill gateway-key`: keys for it."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagemill.cli.app import (
    EXIT_REDIS,
    EXIT_USAGE,
    AtQueue,
    LogOptions,
    Printing,
    announce,
    app,
    print_stderr,
)
from pagemill.cli.terminal.checked import HttpUrl, LogLevel, Priority, between
from pagemill.cli.terminal.options import Options
from pagemill.producer.wire.schema.host_names import HostName
from pagemill.producer.wire.schema.keys import ModelName, TenantName
from pagemill.producer.wire.server.clients import redacted
from pagemill.producer.wire.server.discovery import find_redis

if TYPE_CHECKING:
    from pagemill.producer.gateway.config import GatewayConfig

DEFAULT_PORT = 8000


class GatewayLogOptions(LogOptions):
    log_level: Annotated[LogLevel, typer.Option(envvar="PAGEMILL_LOG_LEVEL")] = "info"
    """Log level: debug, info, warning or error; info logs a line per request."""


class GatewayOptions(Options):
    """An option with the name of a field of `GatewayConfig` sets it."""

    host: Annotated[HostName, typer.Option(envvar="PAGEMILL_GATEWAY_HOST")] = "127.0.0.1"
    """Listen address; 0.0.0.0 makes it reachable from other hosts."""
    port: Annotated[int, between(0, 65_535), typer.Option(envvar="PAGEMILL_GATEWAY_PORT")] = DEFAULT_PORT
    """Port; 0: any free port."""
    fd: Annotated[int | None, between(3, 10**6)] = None
    """Inherited listening socket of --host and --port."""
    keys: Annotated[Path | None, typer.Option(envvar="PAGEMILL_GATEWAY_KEYS", dir_okay=False)] = None
    """File with the API keys (pagemill gateway-key)."""
    no_keys: bool = False
    """Serve all clients that reach --host without keys."""
    public_url: Annotated[
        HttpUrl | None, typer.Option(envvar="PAGEMILL_GATEWAY_PUBLIC_URL", metavar="URL")
    ] = None
    """Address for browsers, in links to the page of jobs. Default: from --host and --port."""
    models: Annotated[list[ModelName] | None, typer.Option("--model")] = None
    """Model to accept before a worker serves it; may be repeated."""
    timeout_s: Annotated[float, between(0.1, 86_400.0), typer.Option("--timeout")] = 600.0
    """Maximum duration of a request, in seconds."""
    unknown_model_s: Annotated[float, between(0.0, 86_400.0), typer.Option("--unknown-model-timeout")] = 30.0
    """Seconds that a batch's requests wait for an unknown model while a worker is ready."""
    max_connections: Annotated[int, between(1, 10**6)] = 20_000
    """Maximum number of connections; above it, the longest idle one is closed."""
    max_in_flight: Annotated[int, between(1, 10**6)] = 2_000
    """Maximum number of open requests; above it, requests get 503."""
    log: GatewayLogOptions
    separate_reasoning: bool = False
    """Return the reasoning of every chat separately; all workers must support it."""


@app.command()
def gateway(flags: GatewayOptions, at: AtQueue) -> None:
    """Serve OpenAI's HTTP interface until SIGTERM. Several gateways can share a queue."""
    _need_extra()
    from pagemill.monitoring.logging import configure_logging
    from pagemill.producer.gateway.config import GatewayConfig
    from pagemill.producer.gateway.guard.origin import LOOPBACK

    if flags.keys is None and not flags.no_keys and flags.host not in LOOPBACK:
        print_stderr(
            f"{flags.host} is reached by others: give --keys FILE (pagemill gateway-key), or --no-keys"
        )
        raise typer.Exit(EXIT_USAGE)
    given = flags.fields_of(GatewayConfig) | {"keys_path": flags.keys, "models": tuple(flags.models or ())}
    config = GatewayConfig(redis_url=find_redis(at.redis_url), queue=at.queue, **given)
    configure_logging(flags.log.log_level, flags.log.log_format, fields={"queue": at.queue})
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    _serve(config, flags.fd, flags.log.log_format)


def _serve(config: GatewayConfig, fd: int | None, log_format: str) -> None:
    from pagemill.producer.gateway.api_keys import KeyFileError
    from pagemill.producer.gateway.server import bind, build_server, inherit

    host = config.host
    try:
        listener = bind(config) if fd is None else inherit(fd)
    except OSError as error:
        if fd is not None:
            raise typer.BadParameter(
                f"--fd {fd}: not a listening socket: {error.strerror or error}"
            ) from error
        raise typer.BadParameter(
            f"{host}:{config.port} cannot be listened on: {error.strerror or error}; "
            "choose another --host or --port (PAGEMILL_GATEWAY_HOST, PAGEMILL_GATEWAY_PORT)"
        ) from error
    with listener:
        address = _address(host, listener.getsockname()[1])
        try:
            server = build_server(replace(config, public_url=config.public_url or address))
        except KeyFileError as error:
            raise typer.BadParameter(f"--keys (PAGEMILL_GATEWAY_KEYS): {error}") from error
        place = f"queue {config.queue} at {redacted(config.redis_url or '')}"
        announce(f"{address}/v1 in front of {place}", log_format)
        announce(f"{address}/jobs shows its jobs in a browser", log_format)
        server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(EXIT_REDIS)


def _address(host: str, port: int) -> str:
    """Return the address to be shown; where all addresses are listened on, by this machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


class KeyOptions(Options):
    name: Annotated[TenantName, typer.Argument(metavar="NAME")]
    """Name of the key, in the file and for its rate."""
    tenant: TenantName | None = None
    """Tenant of the jobs. Default: the name of the key."""
    priority: Priority = "normal"
    """high, normal or low."""
    rate: Annotated[float | None, between(1e-6, 1e6)] = None
    """Requests per second."""
    burst: Annotated[int | None, between(1, 10**6)] = None
    """Number of requests in a burst."""
    model: list[ModelName] | None = None
    """Model that the key can use; may be repeated. Default: all."""
    operator: bool = False
    """Let the key see, cancel and replay the jobs of all tenants."""
    keys: Annotated[Path | None, typer.Option(dir_okay=False)] = None
    """File to add the key to; created if it does not exist."""


@app.command("gateway-key")
def gateway_key(flags: KeyOptions, printing: Printing) -> None:
    """Create an API key for the gateway. The key is printed once; the file gets its hash."""
    _need_extra()
    from pagemill.producer.gateway.api_keys import ApiKey, KeyFileError, add_key, new_key

    key, digest = new_key()
    try:
        made = ApiKey(
            name=flags.name, sha256=digest, tenant=flags.tenant or flags.name, priority=flags.priority,
            rate=flags.rate, burst=flags.burst, models=tuple(flags.model) if flags.model else None,
            operator=flags.operator,
        )  # fmt: skip
        if flags.keys is not None:
            add_key(flags.keys, made)
    except KeyFileError as error:
        raise typer.BadParameter(f"--keys: {error}") from error
    entry = made.model_dump(exclude_defaults=True)
    if printing.as_json:
        typer.echo(json.dumps({"key": key, "entry": entry}))
        return
    typer.echo(key)
    if flags.keys is None:
        print_stderr(f'put this into the list "keys" of the file of --keys: {json.dumps(entry)}')


def _need_extra() -> None:
    needed = ("starlette", "uvicorn", "python_multipart", "prometheus_client", "structlog")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print_stderr(f"the gateway needs {', '.join(missing)}: pip install 'pagemill[gateway]'")
        raise typer.Exit(EXIT_USAGE)
