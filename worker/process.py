"""The worker's process: signals, the embedded server, the watchdog, and the exit code.

A supervisor restarts a process that exits non-zero, so every failure here ends in an exit: a worker whose
engine hangs must not look alive.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

from pagemill.engine.errors import ConfigError, EngineError, is_exhausted
from pagemill.monitoring.logging import configure_logging
from pagemill.producer.wire.process.stop_signals import stop_signals
from pagemill.producer.wire.schema.errors import PagemillError, RedisRefused, RedisUnavailable
from pagemill.producer.wire.server import discovery
from pagemill.worker.config import WorkerConfig
from pagemill.worker.embedded import EmbeddedServer, EmbeddedServerError
from pagemill.worker.engine_host.choice import runs_in_process
from pagemill.worker.interpreter import prepare_for_steps, stay_without_torch
from pagemill.worker.long_wait import LongWait
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.watchdog import Watchdog
from pagemill.worker.worker import Worker

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REDIS = 3
WATCH_S = 0.2
CLOSE_S = 5.0
"""The part of the shutdown time reserved for stopping threads and the embedded server."""


class ShutdownSignals:
    """Counts SIGTERM, SIGINT and SIGHUP: the first requests a drain, the second a fast one."""

    def __init__(self) -> None:
        self.asked = SignalFlag()
        self.hurry = SignalFlag()
        self.first_at = 0.0

    def install(self) -> None:
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            self.hurry.set()
        else:
            self.first_at = time.monotonic()
            self.asked.set()


def run_worker(config: WorkerConfig) -> int:
    """Run a worker until SIGTERM, SIGINT or SIGHUP. Returns the exit code: 0 drained, 1 failed, 2 usage, 3 Redis.

    Call it on the main thread, once per process. It does not raise errors that a user can cause.
    """
    configure_logging(config.log_level, config.log_format)
    signals = ShutdownSignals()
    signals.install()
    if runs_in_process(config):
        stay_without_torch()
    try:
        if config.redis_url is not None:
            return _serve(config, discovery.with_credentials(config.redis_url), None, signals)
        with _embedded_server(config) as server:
            return _serve(config, server.url, server, signals)
    except (ConfigError, EmbeddedServerError, EngineError, OSError, PagemillError) as error:
        logger.error("%s", error)
        return _exit_code(error)


def _exit_code(error: Exception) -> int:
    match error:
        case EmbeddedServerError() | RedisUnavailable() | RedisRefused():
            return EXIT_REDIS
        case OSError() if is_exhausted(error):
            return EXIT_FAILED
        case ConfigError() | OSError() | PagemillError():
            return EXIT_USAGE
    return EXIT_FAILED  # of the engine: a process of a spread model crashed, or no more results can be held


def _embedded_server(config: WorkerConfig) -> EmbeddedServer:
    """Start or attach to the server. Raises EmbeddedServerError, ConfigError (configured directory), EngineError."""
    directory = config.state_dir or discovery.state_dir()
    try:
        return EmbeddedServer.open(directory)
    except OSError as error:
        message = (
            f"the state directory {directory} can't be used: {error.strerror or error}; name another with "
            f"--state-dir ({discovery.STATE_DIR_VARIABLE}), or a server with --redis-url ({discovery.URL_VARIABLE})"
        )
        is_theirs = config.state_dir is not None and not is_exhausted(error)
        raise (ConfigError if is_theirs else EngineError)(message) from error


def _serve(
    config: WorkerConfig, redis_url: str, server: EmbeddedServer | None, signals: ShutdownSignals
) -> int:
    worker = Worker(config, redis_url)
    configure_logging(config.log_level, config.log_format, fields=worker.log_fields)
    watchdog = Watchdog(config.engine_stall_s)
    is_clean = False
    try:
        worker.start()
        reason = _watch(worker, server, signals, watchdog)
        if reason is not None:
            logger.critical("%s; the process exits, and other workers take its jobs over", reason)
            worker.abandon()
            return EXIT_FAILED
        give_up_at = signals.first_at + config.shutdown_s
        _exit_hard_at(give_up_at)
        worker.drain(config.drain_grace_s, signals.hurry, give_up_at - CLOSE_S)
        is_clean = True
        return EXIT_OK
    finally:
        if not worker.close():
            # Tearing down a thread in the model's code together with the interpreter may crash the process.
            logger.warning("the engine does not stop; leaving without it")
            if server is not None:
                server.close()
            _exit_hard(EXIT_OK if is_clean else EXIT_FAILED)
        watchdog.disarm()


def _watch(
    worker: Worker, server: EmbeddedServer | None, signals: ShutdownSignals, watchdog: Watchdog
) -> str | None:
    """Wait for a signal (None) or the worker's failure (the reason). Raises errors of loading the model."""

    def on_loaded() -> None:
        prepare_for_steps()
        watchdog.arm()

    loading = LongWait(logger)
    while not signals.asked.wait(WATCH_S):
        if not worker.wait_ready(timeout=0, on_loaded=on_loaded):
            loading.report("still loading, %.0f s by now", loading.seconds)
        if (reason := worker.failure()) is not None:
            return reason
        if server is not None:
            server.revive()
    return None


def _exit_hard_at(moment: float) -> None:
    """Exit the process at `moment` (monotonic), even if something hangs."""

    def run() -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
        logger.critical("the worker did not end in time; its leases will lapse")
        _exit_hard(EXIT_FAILED)

    threading.Thread(target=run, name="pagemill-exit", daemon=True).start()


def _exit_hard(code: int) -> None:
    logging.shutdown()
    os._exit(code)
