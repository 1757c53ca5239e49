"""The worker: an engine, a queue, and the threads between them, from start to drain.

Threads: the engine's; admission pulls jobs into it; the reporter takes its outputs and writes them; the lease
keeper renews. The one that called `run_worker` waits for signals and watches the others.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from engine.errors import ConfigError
from monitoring.counters import WorkerCounters, WorkerState
from monitoring.exporter import WorkerMetrics
from monitoring.queue_figures import QueueFigures
from producer.wire import discovery
from producer.wire.errors import PagemillError, RedisUnavailable
from producer.wire.registry import WorkerInfo
from worker.admission import Admission
from worker.config import WorkerConfig
from worker.embedded import EmbeddedServer, EmbeddedServerError
from worker.engine_thread import EngineState, EngineThread
from worker.http import Health, Probes, StatusServer
from worker.job_queue import Connectivity, JobQueue, ServerClock, warn_about_server
from worker.job_table import JobTable
from worker.leases import LeaseKeeper
from worker.progress import ProgressReporter
from worker.queue_reader import QueueReader
from worker.running_job import RunningJob

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REDIS = 3
WATCH_S = 0.2
CLOSE_S = 5.0
"""Of the time to shut down, what ending threads and the embedded server may take."""
WRITE_OUT_S = 5.0
"""After the hand-back, how long the last writes may take; leases lapse for what could not be written."""


class Worker:
    """One engine on one queue: `start`, `wait_ready`, `failure` now and then; at the end `drain`, `close`."""

    def __init__(self, config: WorkerConfig, redis_url: str) -> None:
        self.config = config
        self.worker_id = f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.counters = WorkerCounters()
        self.connectivity = Connectivity(self.counters)
        self._started_at = time.time()
        self._redis_url = redis_url
        self._queues: list[JobQueue] = []
        self._clock = ServerClock()
        self._is_draining = False
        self._is_serving = False
        self._http: StatusServer | None = None
        self._queue_reader = QueueReader(self._new_queue(), self._clock)
        self.table = JobTable()
        self.reporter = ProgressReporter(
            config,
            self._new_queue(),
            self.table,
            self._clock,
            self.counters,
            on_finished=self._on_finished,
        )
        self.engine = EngineThread(config.engine, self.reporter.deliver)
        self.leases = LeaseKeeper(
            self._new_queue(),
            self.table,
            self.reporter,
            self._clock,
            self.counters,
            renew_s=config.renew_s,
            is_well=self._is_engine_well,
            describe=self._describe,
        )
        self.admission = Admission(
            self._new_queue(),
            self.engine,
            self.table,
            self.reporter,
            self.leases,
            self._clock,
            self.counters,
        )
        self._metrics = WorkerMetrics(
            self.counters, lambda: self.engine.stats, self._queue_figures, version=_version()
        )

    def start(self) -> None:
        """Check the server, open the status port, begin to load the model.

        Raises RedisUnavailable, or OSError (`worker.http.PortTaken`) when the port can't be had.
        """
        probe = self._new_queue()
        warn_about_server(probe.server_info())
        self._clock.set(probe.server_time())
        probes = Probes(metrics=self._render_metrics, health=self._health, readiness=self._readiness)
        self._http = StatusServer(self.config.http_host, self.config.http_port, probes)
        logger.info("metrics at %s/metrics, health at %s/healthz", self._http.url, self._http.url)
        logger.info("loading %s", self.config.engine.model)
        self.engine.start()
        self.leases.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait for the model, then serve. False if it is not there after `timeout` seconds.

        Raises `engine.errors.EngineError`, mostly ConfigError, when the model can't be loaded.
        """
        if self._is_serving:
            return True
        if not self.engine.wait_loaded(timeout):
            return False
        self._is_serving = True
        self.counters.model_load_seconds = time.time() - self._started_at
        self.reporter.start(self.engine)
        self.admission.start([self.model])
        self.leases.announce()  # who submits without naming a model asks the registry
        tier = self.engine.engine.tier
        logger.info(
            "ready: model %s, queue %s, worker %s, tier %s",
            self.model,
            self.config.queue,
            self.worker_id,
            tier,
        )
        return True

    @property
    def model(self) -> str:
        """The served name. Only once the model is loaded."""
        return self.engine.engine.served_model

    @property
    def http_url(self) -> str | None:
        return self._http.url if self._http is not None else None

    def failure(self) -> str | None:
        """Why this worker can't go on; None while it can."""
        if self.engine.state is EngineState.FAILED:
            return f"the engine died: {self.engine.error!r}"
        if not self._is_engine_well():
            return f"the engine has got nowhere for {self.engine.stalled_for():.0f} s"
        if not self.leases.is_alive:
            return "the thread that renews leases died"
        if self._is_serving and not self.reporter.is_alive:
            return "the thread that writes results died"
        if self._is_serving and not self._is_draining and not self.admission.is_alive:
            return "the thread that pulls jobs died"
        return None

    def drain(self, grace_s: float, hurry: threading.Event, give_up_at: float) -> None:
        """Pull no more; let jobs run on for `grace_s` or until `hurry`; checkpoint and hand back the rest.

        All of it ends before `give_up_at` (monotonic).
        """
        self._is_draining = True
        self.leases.announce()
        self.admission.stop()
        if self._is_serving:
            logger.info("draining: %d jobs may run on for %.0f s", len(self.table), grace_s)
            self._wait_for_jobs(min(time.monotonic() + grace_s, give_up_at - WRITE_OUT_S), hurry)
            self.admission.join(max(0.0, min(5.0, give_up_at - WRITE_OUT_S - time.monotonic())))
            if len(self.table):
                logger.info("handing back %d jobs", len(self.table))
            self.reporter.hand_back_all()
            if not self.reporter.stop(max(0.0, min(WRITE_OUT_S, give_up_at - time.monotonic()))):
                logger.warning("%d jobs could not be handed back; their leases will lapse", len(self.table))

    def abandon(self) -> None:
        """Pull no more, and write what has ended; the leases of the rest lapse."""
        self.admission.stop()
        self.reporter.stop(WRITE_OUT_S, abandon=True)

    def close(self) -> bool:
        """End all threads; False if the engine's could not be ended. Jobs still held are left to lapse."""
        self.admission.stop()
        self.leases.stop(timeout=2.0)
        is_engine_gone = self.engine.stop(timeout=2.0)
        if self._http is not None:
            self._http.close()
            self._http = None
        for queue in self._queues:
            queue.close()
        self.counters.state = "stopped"
        return is_engine_gone

    def _wait_for_jobs(self, until: float, hurry: threading.Event) -> None:
        while len(self.table) and time.monotonic() < until and not hurry.is_set():
            if self.failure() is not None:
                return
            hurry.wait(0.05)

    def _new_queue(self) -> JobQueue:
        queue = JobQueue(
            self._redis_url,
            self.config.queue,
            self.worker_id,
            round(self.config.lease_s * 1000),
            self.connectivity,
        )
        self._queues.append(queue)
        return queue

    def _is_engine_well(self) -> bool:
        return self.engine.stalled_for() < self.config.engine_stall_s

    def _describe(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.worker_id,
            models=(self.model,) if self._is_serving else (),
            state=self._state(),
            url=self.http_url,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            running=len(self.table),
        )

    def _state(self) -> str:
        if not self._is_engine_well():
            return "unwell"
        if self._is_draining:
            return "draining"
        return "ready" if self._is_serving else "loading"

    def _health(self) -> Health:
        """Live while the engine gets anywhere, or has nothing to do, or is loading."""
        stalled_s = self.engine.stalled_for()
        details = {"engine": self.engine.state.value, "stalled_s": round(min(stalled_s, 1e9), 3)}
        return Health(self.failure() is None, details)

    def _readiness(self) -> Health:
        state = self._state()
        details: dict[str, Any] = {
            "state": state,
            "redis": "up" if self.connectivity.is_up else "away",
            "worker": self.worker_id,
            "queue": self.config.queue,
            "running": len(self.table),
            "admission_blocked": self.admission.blocked,
        }
        if self._is_serving:
            engine = self.engine.engine
            details |= {"model": self.model, "tier": engine.tier, "fingerprint": engine.fingerprint}
        return Health(state == "ready" and self.connectivity.is_up, details)

    def _render_metrics(self) -> bytes:
        self.counters.state = self._public_state()
        return self._metrics.render()

    def _public_state(self) -> WorkerState:
        match self._state():
            case "loading":
                return "starting"
            case "draining":
                return "draining"
            case "ready" if self.connectivity.is_up:
                return "paused" if self.admission.blocked == "paused" else "ready"
        return "degraded"

    def _queue_figures(self) -> QueueFigures | None:
        """None while Redis is away: a scrape must not wait for it."""
        return self._queue_reader.read() if self.connectivity.is_up else None

    def _on_finished(self, job: RunningJob | None) -> None:
        self.admission.on_finished(job)


class ShutdownSignals:
    """SIGTERM and SIGINT, counted: the first asks for a drain, the second to hurry."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.hurry = threading.Event()
        self.first_at = 0.0

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            self.hurry.set()
        else:
            self.first_at = time.monotonic()
            self.asked.set()


def run_worker(config: WorkerConfig) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit code: 0 drained, 1 failed, 2 usage, 3 Redis.

    On the main thread, once per process. Nothing is raised that a user could cause.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signals = ShutdownSignals()
    signals.install()
    try:
        if config.redis_url is not None:
            return _serve(config, config.redis_url, None, signals)
        with EmbeddedServer.open(config.state_dir or discovery.state_dir()) as server:
            return _serve(config, server.url, server, signals)
    except (EmbeddedServerError, RedisUnavailable) as error:
        logger.error("%s", error)
        return EXIT_REDIS
    except (ConfigError, OSError, PagemillError) as error:
        logger.error("%s", error)
        return EXIT_USAGE


def _serve(
    config: WorkerConfig, redis_url: str, server: EmbeddedServer | None, signals: ShutdownSignals
) -> int:
    worker = Worker(config, redis_url)
    is_clean = False
    try:
        worker.start()
        reason = _watch(worker, server, signals)
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
            # A thread stuck in the model's code would be torn down with the interpreter, which may crash it.
            logger.warning("the engine does not stop; leaving without it")
            if server is not None:
                server.close()
            _exit_hard(EXIT_OK if is_clean else EXIT_FAILED)


def _watch(worker: Worker, server: EmbeddedServer | None, signals: ShutdownSignals) -> str | None:
    """Until a signal comes (None) or the worker can't go on (why). Raises what loading the model raises."""
    while not signals.asked.wait(WATCH_S):
        worker.wait_ready(timeout=0)
        if (reason := worker.failure()) is not None:
            return reason
        if server is not None:
            server.revive()
    return None


def _exit_hard_at(moment: float) -> None:
    """Whatever hangs, the process is gone at `moment` (monotonic)."""

    def run() -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
        logger.critical("the worker did not end in time; its leases will lapse")
        _exit_hard(EXIT_FAILED)

    threading.Thread(target=run, name="pagemill-exit", daemon=True).start()


def _exit_hard(code: int) -> None:
    logging.shutdown()
    os._exit(code)


def _version() -> str:
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0"
