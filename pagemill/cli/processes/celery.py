"""`pagemill celery-worker`: Celery's worker, whose generations are jobs of the native queue.

`pagemill celery-relay`: Celery's results and links for jobs that `pagemill.producer.celery` submitted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from pagemill.cli.app import AtServer, app, print_stderr
from pagemill.cli.local_worker import LocalWorker, has_server, serving_workers
from pagemill.cli.processes.worker import WorkerOptions, check_options
from pagemill.cli.terminal.checked import AppName, CeleryQueue, ModelOrPath, Transport, served_name
from pagemill.cli.terminal.options import Options
from pagemill.cli.terminal.setting_flags import options as flags
from pagemill.cli.terminal.setting_flags import settings_of
from pagemill.cli.terminal.waiting import Waiting
from pagemill.producer.wire.process.stop_signals import stop_signals
from pagemill.producer.wire.schema.keys import QueueName
from pagemill.producer.wire.server.clients import ServerAddress
from pagemill.producer.wire.server.discovery import find_redis

if TYPE_CHECKING:
    from celery import Celery

EXIT_USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CeleryWorkerSettings:
    """The settings of `pagemill celery-worker`."""

    model: ModelOrPath | None = None
    """A Hugging Face directory, smollm2 or echo."""
    celery_app: AppName | None = None
    """Your app, for its other tasks. Default: an app without other tasks."""
    celery_broker: Transport | None = None
    """URL of the Celery broker. Default: the Redis URL."""
    celery_backend: Transport | None = None
    """URL of the Celery result backend. Default: the Redis URL."""
    queue: CeleryQueue = "pagemill"
    """The Celery queue to consume."""
    native_queue: QueueName = "celery"
    """The queue of the generations; more workers can serve it."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 256
    """Threads: the maximum number of tasks at a time."""


_SETTINGS = settings_of(CeleryWorkerSettings)
_FLAGS = flags(
    _SETTINGS,
    {"model": {"envvar": "PAGEMILL_MODEL"}, "celery_app": {"metavar": "MODULE:APP"}},
    first=list(_SETTINGS),
    is_checked=True,
)


@app.command("celery-worker", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def celery_worker(
    context: typer.Context, values: Annotated[dict[str, Any], _FLAGS], worker: WorkerOptions, at: AtServer
) -> None:
    """Serve `pagemill.generate` to any Celery app. Arguments after -- go to Celery's worker."""
    settings = CeleryWorkerSettings(**values)
    if settings.model is None:
        raise typer.BadParameter("--model (PAGEMILL_MODEL): a model is required")
    application = _loaded(settings.celery_app)
    import click  # a dependency of Celery

    _check_transports(application, settings)
    check_options(worker.worker_option)
    with contextlib.ExitStack() as stack:
        url = _serving(stack, at.redis_url, settings.native_queue, settings.model, worker.worker_option or [])
        _configure(application, url, settings, served_name(settings.model))
        arguments = ["worker", "-P", "threads", "-Q", settings.queue, "-c", str(settings.concurrency)]
        arguments += ["--loglevel", "INFO", *context.args]
        try:
            application.worker_main(arguments)
        except click.UsageError as error:
            raise typer.BadParameter(f"Celery rejects its arguments: {error.format_message()}") from None


class RelayOptions(Options):
    celery_app: Annotated[AppName, typer.Option(metavar="MODULE:APP")]
    """Celery app of the tasks."""
    at: AtServer
    queues: Annotated[list[QueueName] | None, typer.Option("--queue")] = None
    """Native queue of the tasks; may be repeated. Default: default."""


@app.command("celery-relay")
def celery_relay(flags: RelayOptions) -> None:
    """Report native tasks to Celery, and revoke their jobs.

    The tasks are those of pagemill.producer.celery. Runs until SIGTERM.
    """
    application = _loaded(flags.celery_app)
    from pagemill.producer.celery.relay import Relay
    from pagemill.producer.celery.revocations import Revocations

    url = find_redis(flags.at.redis_url)
    relays = [Relay(application, url, queue) for queue in flags.queues or ["default"]]

    def revoke(task_ids: Sequence[str], terminate: bool) -> None:
        for relay in relays:
            relay.revoke(task_ids, terminate)

    def stop(*_: Any) -> None:
        for relay in relays:
            relay.stop()

    for number in stop_signals():
        signal.signal(number, stop)
    print_stderr(f"relaying queue {', '.join(relay.queue for relay in relays)} for {flags.celery_app}")
    revocations = Revocations(application, revoke)
    revocations.start()
    threads = [threading.Thread(target=relay.run, name=f"relay-{relay.queue}") for relay in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    revocations.stop()


def _loaded(name: str | None) -> Celery:
    """Return the app, or exit with a line on stderr and code 2."""
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        print_stderr(
            f"{error.name} is missing: pip install 'pagemill[celery]'"
            if error.name == "celery"
            else f"--celery-app {name}: {error}"
        )
    except (ImportError, AttributeError, ValueError) as error:
        print_stderr(f"--celery-app {name}: {error}")
    raise typer.Exit(EXIT_USAGE)


def _load(name: str | None) -> Celery:
    if name is None:
        from celery import Celery

        return Celery("pagemill")
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    found = getattr(import_module(module), attribute or "app")
    if not callable(getattr(found, "worker_main", None)):
        raise ValueError(f"{attribute or 'app'} is not a Celery app")
    return found


def _serving(stack: contextlib.ExitStack, url: str | None, queue: str, model: str, options: list[str]) -> str:
    """Return the queue's address, with a worker for the model: a running one, or a child process."""
    if has_server(url):
        url = find_redis(url)
        if serving_workers(url, queue, model, print_stderr):
            print_stderr(f"a live worker of queue {queue} serves {served_name(model)}; using it")
            return url
    settings = [word for option in options for word in ("--option", option)]
    worker = stack.enter_context(LocalWorker(model, queue=queue, url=url, options=settings))
    with Waiting(f"starting a worker for {model}") as waiting:
        return worker.wait_ready(waiting.report)[0]


def _configure(application: Celery, url: str, settings: CeleryWorkerSettings, model: str) -> None:
    from kombu import Connection

    from pagemill.producer.celery.pool import use_task_pool
    from pagemill.producer.celery.serving import TRANSPORT_OPTIONS, serve_task

    use_task_pool()
    logging.getLogger("celery.pool").setLevel(logging.INFO)  # at debug level it logs prompts
    options: dict[str, Any] = dict(application.conf.broker_transport_options or {})
    broker = settings.celery_broker or application.conf.broker_url or _celery_url(url)
    if (
        Connection(broker).get_transport_cls().driver_type == "redis"
    ):  # only there the visibility timeout is refreshed
        options |= TRANSPORT_OPTIONS
    application.conf.update(
        broker_url=broker,
        result_backend=settings.celery_backend or application.conf.result_backend or _celery_url(url),
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
    )
    if settings.celery_app:  # without it, other workers run the tasks after a generation
        application.conf.task_default_queue = settings.queue
    serve_task(application, url, settings.native_queue, model, settings.queue)


def _check_transports(application: Celery, settings: CeleryWorkerSettings) -> None:
    """Raise a usage error for a broker or backend unknown to Celery, instead of its traceback."""
    from celery.app.backends import by_url
    from kombu import Connection

    checks: list[tuple[str, str | None, Callable[[str], Any]]] = [
        ("--celery-broker", settings.celery_broker, lambda url: Connection(url).transport_cls),
        ("--celery-backend", settings.celery_backend, lambda url: by_url(url, application.loader)),
    ]
    for option, url, load in checks:
        if url is None:
            continue
        try:
            load(url)
        except Exception as error:  # any error of the libraries it imports
            scheme = url.partition(":")[0]
            raise typer.BadParameter(
                f"{option}: Celery can't use {scheme!r} here: {type(error).__name__}"
            ) from error


def _celery_url(url: str) -> str:
    """Return the address in kombu's form. Celery requires `ssl_cert_reqs` for TLS; the default is to verify."""
    address = ServerAddress.parse(url)
    url = address.url if address.kind == "server" else url
    if url.startswith("rediss://") and "ssl_cert_reqs=" not in url:
        url += f"{'&' if '?' in url else '?'}ssl_cert_reqs=required"
    return url.replace("unix://", "redis+socket://", 1) if url.startswith("unix://") else url
