"""`pagemill exporter`: the command; queue_exporter.py has the implementation."""

from __future__ import annotations

from typing import Annotated

import typer

from pagemill.cli.app import EXIT_USAGE, RedisUrl, announce, app, print_stderr
from pagemill.cli.terminal import options
from pagemill.cli.terminal.checked import LogLevel, between, checked
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.host_names import HostName
from pagemill.producer.wire.server.clients import redacted
from pagemill.producer.wire.server.discovery import find_redis

DEFAULT_EXPORTER_PORT = 9791
DISCOVER_EVERY_S = 60.0


@app.command()
def exporter(
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            callback=checked(keys.QueueName),
            help="Queue to export; may be repeated. Default: all queues.",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    http_host: Annotated[
        str,
        typer.Option(
            "--http-host",
            callback=checked(HostName),
            help="Listen address; 0.0.0.0 allows scrapes from other hosts.",
        ),
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option("--http-port", min=0, max=65535, help="Port of the exporter; 0: any free port.")
    ] = DEFAULT_EXPORTER_PORT,
    discover_every: Annotated[
        float,
        typer.Option(
            "--discover-every",
            callback=between(1.0, 86_400.0),
            help="Seconds between searches for new queues.",
        ),
    ] = DISCOVER_EVERY_S,
    log_level: Annotated[
        str,
        typer.Option(
            "--log-level",
            envvar="PAGEMILL_LOG_LEVEL",
            callback=checked(LogLevel),
            help="Log level: debug, info, warning or error.",
        ),
    ] = "info",
    log_format: options.LogFormatName = "console",
) -> None:
    """Export queue gauges to Prometheus, without a worker. Runs until SIGTERM; metrics are at /metrics."""
    url = find_redis(redis_url)
    try:
        from pagemill.monitoring.logging import configure_logging
        from pagemill.worker.status.queue_exporter import QueueSet, run_exporter
    except ModuleNotFoundError as error:
        print_stderr(f"{error.name} is missing: pip install 'pagemill[exporter]'")
        raise typer.Exit(EXIT_USAGE) from error
    configure_logging(log_level, log_format)  # type: ignore[arg-type]  # checked above
    announce(f"exporting {', '.join(queue) if queue else 'every queue'} of {redacted(url)}", log_format)
    try:
        run_exporter(QueueSet(url, queue or (), discover_every), http_host, http_port)
    except OSError as error:
        raise typer.BadParameter(str(error)) from error
