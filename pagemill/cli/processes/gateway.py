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

from pagemill.cli.app import EXIT_REDIS, EXIT_USAGE, AsJson, Queue, RedisUrl, announce, app, print_stderr
from pagemill.cli.terminal import options
from pagemill.cli.terminal.checked import HttpUrl, LogLevel, Priority, between, checked
from pagemill.producer.wire.schema.host_names import HostName
from pagemill.producer.wire.schema.keys import ModelName, TenantName
from pagemill.producer.wire.server.clients import redacted
from pagemill.producer.wire.server.discovery import find_redis

if TYPE_CHECKING:
    from pagemill.producer.gateway.config import GatewayConfig

DEFAULT_PORT = 8000


Host = Annotated[
    str,
    typer.Option(
        "--host",
        envvar="PAGEMILL_GATEWAY_HOST",
        callback=checked(HostName),
        help="Listen address; 0.0.0.0 makes it reachable from other hosts.",
    ),
]

GatewayLogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        envvar="PAGEMILL_LOG_LEVEL",
        callback=checked(LogLevel),
        help="Log level: debug, info, warning or error; info logs a line per request.",
    ),
]

Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", callback=between(0.1, 86_400.0), help="Maximum duration of a request, in seconds."
    ),
]
MaxConnections = Annotated[
    int,
    typer.Option(
        "--max-connections",
        min=1,
        max=10**6,
        help="Maximum number of connections; above it, the longest idle one is closed.",
    ),
]
MaxInFlight = Annotated[
    int,
    typer.Option(
        "--max-in-flight",
        min=1,
        max=10**6,
        help="Maximum number of open requests; above it, requests get 503.",
    ),
]
UnknownModelTimeout = Annotated[
    float,
    typer.Option(
        "--unknown-model-timeout",
        callback=between(0.0, 86_400.0),
        help="Seconds that a batch's requests wait for an unknown model while a worker is ready.",
    ),
]


@app.command()
def gateway(
    host: Host = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65_535, envvar="PAGEMILL_GATEWAY_PORT", help="Port; 0: any free port."
        ),
    ] = DEFAULT_PORT,
    fd: Annotated[
        int | None,
        typer.Option("--fd", min=3, max=10**6, help="Inherited listening socket of --host and --port."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            envvar="PAGEMILL_GATEWAY_KEYS",
            dir_okay=False,
            help="File with the API keys (pagemill gateway-key).",
        ),
    ] = None,
    no_keys: Annotated[
        bool,
        typer.Option("--no-keys", help="Serve all clients that reach --host without keys."),
    ] = False,
    public_url: Annotated[
        str | None,
        typer.Option(
            "--public-url",
            envvar="PAGEMILL_GATEWAY_PUBLIC_URL",
            metavar="URL",
            callback=checked(HttpUrl),
            help="Address for browsers, in links to the page of jobs. Default: from --host and --port.",
        ),
    ] = None,
    models: options.NamedModels = None,
    timeout: Timeout = 600.0,
    unknown_model_timeout: UnknownModelTimeout = 30.0,
    max_connections: MaxConnections = 20_000,
    max_in_flight: MaxInFlight = 2_000,
    log_level: GatewayLogLevel = "info",
    log_format: options.LogFormatName = "console",
    separate_reasoning: options.SeparateReasoning = False,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
) -> None:
    """Serve OpenAI's HTTP interface until SIGTERM. Several gateways can share a queue."""
    _need_extra()
    from pagemill.monitoring.logging import configure_logging
    from pagemill.producer.gateway.config import GatewayConfig
    from pagemill.producer.gateway.guard.origin import LOOPBACK

    if keys is None and not no_keys and host not in LOOPBACK:
        print_stderr(f"{host} is reached by others: give --keys FILE (pagemill gateway-key), or --no-keys")
        raise typer.Exit(EXIT_USAGE)
    url = find_redis(redis_url)
    config = GatewayConfig(
        redis_url=url, queue=queue, host=host, port=port, keys_path=keys, models=tuple(models or ()),
        timeout_s=timeout, max_connections=max_connections, max_in_flight=max_in_flight,
        separate_reasoning=separate_reasoning, public_url=public_url, unknown_model_s=unknown_model_timeout,
    )  # fmt: skip
    configure_logging(log_level, log_format, fields={"queue": queue})  # type: ignore[arg-type]  # checked above
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    _serve(config, fd, log_format)


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


@app.command("gateway-key")
def gateway_key(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            callback=checked(TenantName),
            help="Name of the key, in the file and for its rate.",
        ),
    ],
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", callback=checked(TenantName), help="Tenant of the jobs. Default: the name of the key."
        ),
    ] = None,
    priority: Annotated[
        str, typer.Option("--priority", callback=checked(Priority), help="high, normal or low.")
    ] = "normal",
    rate: Annotated[
        float | None, typer.Option("--rate", callback=between(1e-6, 1e6), help="Requests per second.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option("--burst", min=1, max=10**6, help="Number of requests in a burst.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            callback=checked(ModelName),
            help="Model that the key can use; may be repeated. Default: all.",
        ),
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Let the key see, cancel and replay the jobs of all tenants.")
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", dir_okay=False, help="File to add the key to; created if it does not exist."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key for the gateway. The key is printed once; the file gets its hash."""
    _need_extra()
    from pagemill.producer.gateway.api_keys import ApiKey, KeyFileError, add_key, new_key

    key, digest = new_key()
    try:
        made = ApiKey(
            name=name, sha256=digest, tenant=tenant or name, priority=priority,  # type: ignore[arg-type]
            rate=rate, burst=burst, models=tuple(model) if model else None, operator=operator,
        )  # fmt: skip
        if keys is not None:
            add_key(keys, made)
    except KeyFileError as error:
        raise typer.BadParameter(f"--keys: {error}") from error
    entry = made.model_dump(exclude_defaults=True)
    if as_json:
        typer.echo(json.dumps({"key": key, "entry": entry}))
        return
    typer.echo(key)
    if keys is None:
        print_stderr(f'put this into the list "keys" of the file of --keys: {json.dumps(entry)}')


def _need_extra() -> None:
    needed = ("starlette", "uvicorn", "python_multipart", "prometheus_client", "structlog")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print_stderr(f"the gateway needs {', '.join(missing)}: pip install 'pagemill[gateway]'")
        raise typer.Exit(EXIT_USAGE)
