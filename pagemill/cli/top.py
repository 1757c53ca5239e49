"""`pagemill top`: the live page in a terminal."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from pagemill.cli.app import EXIT_REDIS, Report, app, print_stderr
from pagemill.cli.terminal.checked import HttpUrl, between
from pagemill.cli.terminal.options import Options
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.server.discovery import find_redis

if TYPE_CHECKING:
    from pagemill.monitoring.queue_figures import QueueFigures
    from pagemill.worker.status.top_source import TopSource

FIRST_MAP_S = 0.5
ONCE_ROWS = 50


class TopOptions(Options):
    url: HttpUrl | None = None
    """Address of a worker, for instance http://127.0.0.1:9790."""
    worker: keys.Id | None = None
    """Id of a worker of the queue to show."""
    every: Annotated[float, between(0.2, 86_400.0)] = 1.0
    """Seconds between two updates."""
    once: bool = False
    """Print once and exit."""


@app.command()
def top(flags: TopOptions, at: Report) -> None:
    """Watch a worker and its queue in the terminal. KV blocks, throughput, running jobs, ends; needs no torch."""
    from pagemill.worker.status.top_source import TopSource

    logging.getLogger().addHandler(logging.NullHandler())  # unavailable data is shown on the screen
    source = TopSource(_redis(at.redis_url, flags.url), at.queue, url=flags.url, worker_id=flags.worker)
    try:
        if at.as_json or flags.once:
            _print_once(source, at.as_json)
        else:
            _watch(source, flags.every)
    except KeyboardInterrupt:
        return
    finally:
        source.close()


def _redis(redis_url: str | None, url: str | None) -> str | None:
    """Return the queue's URL. With a worker's URL it is optional."""
    try:
        return find_redis(redis_url)
    except RedisUnavailable:
        if url is None:
            raise
        return None


def _watch(source: TopSource, every_s: float) -> None:
    from pagemill.monitoring.live.top import screen

    console = Console(highlight=False, markup=False)
    colors = console.color_system is not None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(source.read(), console.width, console.height, colors=colors), refresh=True)
            time.sleep(every_s)


def _print_once(source: TopSource, as_json: bool) -> None:
    """Print one view, after two reads, since the first only requests the worker's block map."""
    from pagemill.monitoring.live.top import screen

    view = source.read()
    if view.live is not None and view.live["engine"] is not None:
        time.sleep(FIRST_MAP_S)
        view = source.read()
    if as_json:
        queue = None if view.queue is None else _plain(view.queue)
        workers = [asdict(line) for line in view.workers]
        typer.echo(
            json.dumps({"queue": queue, "workers": workers, "live": view.live, "notes": list(view.notes)})
        )
    else:
        console = Console(highlight=False, markup=False)
        colors = console.color_system is not None
        console.print(screen(view, console.width, max(console.height, ONCE_ROWS), colors=colors))
    if view.queue is None and view.live is None:
        for note in view.notes if as_json else ():
            print_stderr(note)
        raise typer.Exit(EXIT_REDIS)


def _plain(queue: QueueFigures) -> dict[str, Any]:
    return {
        "queue": queue.queue,
        "waiting": sum(queue.waiting.values()),
        "oldest_s": max(queue.oldest_age_seconds.values(), default=0.0),
        "delayed": queue.delayed,
        "running": queue.running,
        "dead": queue.dead,
        "paused": queue.paused,
    }
