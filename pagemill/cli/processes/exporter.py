"""`pagemill exporter`: the command; queue_exporter.py has the implementation."""

from __future__ import annotations

from typing import Annotated

import typer

from pagemill.cli.app import EXIT_USAGE, AtServer, LogOptions, announce, app, print_stderr
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.host_names import HostName
from pagemill.producer.wire.server.clients import redacted
from pagemill.producer.wire.server.discovery import find_redis

DEFAULT_EXPORTER_PORT = 9791
DISCOVER_EVERY_S = 60.0


class ExporterOptions(Options):
    queue: list[keys.QueueName] | None = None
    """Queue to export; may be repeated. Default: all queues."""
    at: AtServer
    http_host: HostName = "127.0.0.1"
    """Listen address; 0.0.0.0 allows scrapes from other hosts."""
    http_port: Annotated[int, between(0, 65535)] = DEFAULT_EXPORTER_PORT
    """Port of the exporter; 0: any free port."""
    discover_every: Annotated[float, between(1.0, 86_400.0)] = DISCOVER_EVERY_S
    """Seconds between searches for new queues."""


@app.command()
def exporter(flags: ExporterOptions, log: LogOptions) -> None:
    """Export queue gauges to Prometheus, without a worker. Runs until SIGTERM; metrics are at /metrics."""
    url, queues = find_redis(flags.at.redis_url), flags.queue or ()
    try:
        from pagemill.monitoring.logging import configure_logging
        from pagemill.worker.status.queue_exporter import QueueSet, run_exporter
    except ModuleNotFoundError as error:
        print_stderr(f"{error.name} is missing: pip install 'pagemill[exporter]'")
        raise typer.Exit(EXIT_USAGE) from error
    configure_logging(log.log_level, log.log_format)
    announce(f"exporting {', '.join(queues) or 'every queue'} of {redacted(url)}", log.log_format)
    try:
        run_exporter(QueueSet(url, queues, flags.discover_every), flags.http_host, flags.http_port)
    except OSError as error:
        raise typer.BadParameter(str(error)) from error
