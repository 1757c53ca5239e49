"""The worker: an engine, a queue, and the threads between them, from start to drain.

Threads: the engine's; admission pulls jobs into it; the reporter takes its outputs and writes them; the lease
keeper renews. worker/process.py waits for signals and watches them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from monitoring.counters import WorkerCounters, WorkerState
from monitoring.exporter import WorkerMetrics
from monitoring.queue_figures import QueueFigures
from monitoring.scrape_metrics import WorkerIdentity
from producer.wire.registry import WorkerInfo
from worker.admission import Admission
from worker.config import WorkerConfig
from worker.engine_thread import EngineState, EngineThread
from worker.http import Health, Probes, StatusServer
from worker.job_queue import Connectivity, JobQueue, ServerClock, warn_about_server
from worker.job_table import JobTable
from worker.leases import LeaseKeeper
from worker.progress import ProgressReporter
from worker.queue_reader import QueueReader
from worker.running_job import RunningJob

logger = logging.getLogger(__name__)

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
            self.counters,
            lambda: self.engine.stats,
            self._queue_figures,
            identity=WorkerIdentity(worker=self.worker_id, queue=config.queue, version=_version()),
            vllm_names=config.vllm_metric_names,
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
        now = self._clock.now()
        ages = (now - job.started_at for job in self.table.running())
        self.counters.oldest_running_job_s = max(ages, default=0.0)
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


def _version() -> str:
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0"
