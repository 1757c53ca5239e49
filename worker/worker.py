"""The worker: an engine, a queue, and the threads between them, from startup to drain.

Threads: the engine's; admission pulls jobs into it; the reporter writes its outputs; the lease keeper renews.
worker/process.py waits for signals and monitors the threads.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from pagemill.common.fingerprint import revision_of, with_adapter
from pagemill.common.installed import installed_version
from pagemill.engine.errors import DeviceLost
from pagemill.engine.outputs import RequestOutput
from pagemill.monitoring.counters import WorkerCounters, WorkerState
from pagemill.monitoring.live.assets import is_loopback
from pagemill.monitoring.live.feed import LiveFeed, LiveSources, PageLinks, WorkerFacts
from pagemill.monitoring.live.job_ends import JobEnds
from pagemill.monitoring.metrics.exporter import WorkerMetrics
from pagemill.monitoring.metrics.metric import Encode
from pagemill.monitoring.metrics.scrape import WorkerIdentity
from pagemill.monitoring.queue_figures import QueueFigures
from pagemill.monitoring.tracing import Tracing
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.process.repeated_errors import RepeatedErrors
from pagemill.producer.wire.schema.needs import known_words
from pagemill.producer.wire.webhooks.policy import WebhookPolicy
from pagemill.worker.adapter_commands import WorkerCommands
from pagemill.worker.audit.auditor import Auditor
from pagemill.worker.config import WorkerConfig
from pagemill.worker.engine_host.choice import make_host
from pagemill.worker.engine_host.messages import EngineState
from pagemill.worker.job_queue import Connectivity, JobQueue, ServerClock, warn_about_server
from pagemill.worker.jobs.admission import Admission
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.jobs.ending import JobListeners
from pagemill.worker.jobs.job_counters import JobCounters
from pagemill.worker.jobs.job_table import JobTable
from pagemill.worker.jobs.journal import Journal
from pagemill.worker.jobs.leases import LeaseKeeper
from pagemill.worker.jobs.reporter import ProgressReporter
from pagemill.worker.jobs.running_job import RunningJob
from pagemill.worker.jobs.speed import SpeedMeter
from pagemill.worker.jobs.store.results import StoredResults
from pagemill.worker.jobs.store.sweeper import StoreSweeper
from pagemill.worker.long_wait import LongWait
from pagemill.worker.pull_control import PullControl, PullState
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.status.live_view import LiveView
from pagemill.worker.status.queue_reader import QueueReader
from pagemill.worker.status.server import Health, LivePage, Probes, StatusServer
from pagemill.worker.webhooks.sender import WebhookSender

logger = logging.getLogger(__name__)
logging.getLogger(LiveFeed.__module__).addFilter(RepeatedErrors())  # monitoring does not import the producer

WRITE_OUT_S = 5.0
"""Seconds for the last writes after jobs are requeued; leases of jobs that could not be written lapse."""


class Worker:
    """An engine on a queue: `start`, `wait_ready`, polls of `failure`; at the end `drain`, `close`."""

    def __init__(self, config: WorkerConfig, redis_url: str) -> None:
        self.config = config
        self.worker_id = f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.counters = WorkerCounters()
        self.connectivity = Connectivity(self.counters)
        self._started = time.monotonic()
        self._redis_url = redis_url
        self._queues: list[JobQueue] = []
        self._clock = ServerClock()
        self._is_draining = False
        self._is_drained = False
        self._is_serving = False
        self._http: StatusServer | None = None
        self._queue_reader = QueueReader(self._new_queue(), self._clock)
        self.table = JobTable()
        self._ends = JobEnds()
        self._tracing = Tracing.from_environment(self.worker_id, installed_version())
        webhook_policy = config.webhook_policy()
        context = WorkerContext(
            config,
            config.signing_keys(),
            self.table,
            self._clock,
            self.counters,
            JobListeners(
                JobCounters(self.counters, self._clock),
                Journal(config.queue, self._ends, self._clock, self._tracing),
            ),
            SpeedMeter(),
        )
        self._speed = context.speed
        store = config.store()
        results = None if store is None else StoredResults(store, self._new_queue)
        self._has_store = store is not None
        self._store_sweeper = None if store is None else StoreSweeper(store, self._new_queue())
        self.reporter = ProgressReporter(
            context, self._new_queue(), on_finished=self._on_finished, results=results
        )
        self.engine = make_host(config, self._deliver, self.log_fields)
        self.leases = LeaseKeeper(
            context,
            self._new_queue(),
            self.reporter,
            is_well=self._is_engine_well,
            describe=self._describe,
        )
        self._pulling = self._pull_control()
        self.audit = self._auditor(context)
        self.admission = Admission(
            context,
            self._new_queue(),
            self.engine,
            self.reporter,
            self.leases,
            webhook_policy,
            pulling=self._pull_state,
        )
        self._commands = WorkerCommands(
            context, self._new_queue(), self.engine, self._pulling, self.leases.announce
        )
        self.webhooks = self._webhook_sender(webhook_policy)
        self._metrics = WorkerMetrics(
            self.counters,
            lambda: self.engine.stats,
            self._queue_figures,
            identity=WorkerIdentity(worker=self.worker_id, queue=config.queue, version=installed_version()),
            vllm_names=config.vllm_metric_names,
        )
        self._live = LiveFeed(self._live_sources())

    def start(self) -> None:
        """Check the server, open the status port, start to load the model.

        Raises RedisUnavailable, or OSError (`pagemill.worker.status.server.PortTaken`) if the port is unavailable.
        """
        probe = self._new_queue()
        warn_about_server(probe.server_info())
        self.counters.redis_clock_skew_s = self._clock.set(probe.server_time())
        self._http = StatusServer(
            self.config.http_host, self.config.http_port, self._probes(), self._live_page()
        )
        logger.info("live page, metrics and health at %s", self._http.url)
        logger.info("loading %s", self.config.engine.model)
        self.engine.start()
        self.leases.start()
        self._live.start()

    def wait_ready(
        self, timeout: float | None = None, *, on_loaded: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait for the model, then serve. False if it is not loaded within `timeout` seconds.

        `on_loaded` is called once, after the model is loaded and before any job is pulled.

        Raises `pagemill.engine.errors.EngineError`, mostly ConfigError, when the model can't be loaded.
        """
        if self._is_serving:
            return True
        if not self.engine.wait_loaded(timeout):
            return False
        on_loaded()
        self._is_serving = True
        self.counters.model_load_seconds = load_s = time.monotonic() - self._started
        self.counters.admission_blocked_seconds.inc("loading", load_s)
        self.reporter.start(self.engine)
        if self.webhooks is not None:
            self.webhooks.start()
        if self._store_sweeper is not None:
            self._store_sweeper.start()
        self.admission.start(lambda: self._describe().lanes())
        self._commands.start()
        self.audit.start()
        self.leases.announce()  # clients that submit without a model name read the registry
        tier = self.engine.engine.tier
        logger.info(
            "ready: model %s, queue %s, worker %s, tier %s",
            ", ".join(self.engine.engine.served_models),
            self.config.queue,
            self.worker_id,
            tier,
        )
        return True

    @property
    def model(self) -> str:
        """The main served name. Available once the model is loaded."""
        return self.engine.engine.served_models[0]

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of all structured log lines."""
        return {"worker": self.worker_id, "queue": self.config.queue}

    @property
    def http_url(self) -> str | None:
        return self._http.url if self._http is not None else None

    def failure(self) -> str | None:
        """The reason this worker must stop; None while it works."""
        if self.engine.state is EngineState.FAILED:
            return f"the engine died: {self.engine.error!r}"
        if (lost := self.engine.lost_rank()) is not None:
            return f"{lost}, and the model is spread over it"
        if not self._is_engine_well():
            return f"the engine has got nowhere for {self.engine.stalled_for():.0f} s"
        if not self.leases.is_alive:
            return "the thread that renews leases died"
        if self._is_serving and not self._is_drained and not self.reporter.is_alive:
            return "the thread that writes results died"
        if self._is_serving and not self._is_draining and not self.admission.is_alive:
            return "the thread that pulls jobs died"
        return None

    def drain(self, grace_s: float, hurry: SignalFlag, give_up_at: float) -> None:
        """Stop pulling; let jobs continue for `grace_s` or until `hurry`; checkpoint and requeue the rest.

        All of it ends before `give_up_at` (monotonic).
        """
        self._is_draining = True
        self.leases.announce()
        self.admission.stop()
        self.audit.stop(timeout=1.0)
        if self._is_serving:
            logger.info("draining: %d jobs may run on for %.0f s", len(self.table), grace_s)
            self._wait_for_jobs(min(time.monotonic() + grace_s, give_up_at - WRITE_OUT_S), hurry)
            self.admission.join(max(0.0, min(5.0, give_up_at - WRITE_OUT_S - time.monotonic())))
            if len(self.table):
                logger.info("requeueing %d jobs", len(self.table))
            self._hand_back_all()
            self._is_drained = True
            if not self.reporter.stop(max(0.0, min(WRITE_OUT_S, give_up_at - time.monotonic()))):
                logger.warning(
                    "%d jobs could not be requeued; they continue when their leases expire", len(self.table)
                )

    def abandon(self) -> None:
        """Stop pulling and write ended jobs; the other leases lapse, unless the device failed."""
        self.admission.stop()
        if isinstance(self.engine.error, DeviceLost):
            self.admission.join(WRITE_OUT_S)  # jobs it has pulled are requeued as well
            self._hand_back_all()
        self.reporter.stop(WRITE_OUT_S, abandon=True)

    def close(self) -> bool:
        """End all threads; False if the engine's could not be ended. The leases of jobs still held lapse."""
        self.admission.stop()
        if self.webhooks is not None:
            self.webhooks.stop(timeout=1.0)
        self._pulling.close()
        self._commands.stop(timeout=1.0)
        self.audit.stop(timeout=1.0)
        if self._store_sweeper is not None:
            self._store_sweeper.stop(timeout=1.0)
        self.leases.stop(timeout=2.0)
        is_engine_gone = self.engine.stop(timeout=2.0)
        self._live.close()
        if self._tracing is not None:
            self._tracing.close()
        if self._http is not None:
            self._http.close()
            self._http = None
        for queue in self._queues:
            queue.close()
        return is_engine_gone

    def _hand_back_all(self) -> None:
        """Requeue every job.

        If a device failed, only the jobs in its last steps can be the cause. They are requeued as if the
        process had crashed: a crash is counted for those without progress, so a job that crashes every device
        soon runs alone and becomes a dead letter, while an innocent job makes progress on another worker and
        is cleared. For the other jobs nothing is counted, regardless of how often devices fail.
        """
        if isinstance(self.engine.error, DeviceLost):
            self.reporter.engine_lost(suspects=self.engine.error.request_ids)
        else:
            self.reporter.hand_back_all()

    def _wait_for_jobs(self, until: float, hurry: SignalFlag) -> None:
        wait = LongWait(logger)
        while len(self.table) and time.monotonic() < until and not hurry.is_set():
            if self.failure() is not None:
                return
            wait.report(
                "draining: %d jobs run on, for %.0f s at most", len(self.table), until - time.monotonic()
            )
            began = time.monotonic()
            hurry.wait(0.05)
            self.counters.admission_blocked_seconds.inc("draining", time.monotonic() - began)

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

    def _pull_control(self) -> PullControl:
        return PullControl(
            self.config.drain_grace_s,
            num_jobs=lambda: len(self.table),
            hand_back=self.reporter.hand_back_all,
            changed=lambda: self.admission.recheck(),
        )

    def _auditor(self, context: WorkerContext) -> Auditor:
        return Auditor(
            context,
            self._new_queue(),
            self.engine,
            version=installed_version(),
            is_idle=lambda: not len(self.table),
            changed=self._on_audited,
        )

    def _webhook_sender(self, policy: WebhookPolicy) -> WebhookSender | None:
        if not policy.is_on:
            return None
        return WebhookSender(
            self._new_queue(),
            policy,
            self.config.webhook_keys(),
            self.counters,
            store=self.config.store(),
            ca_file=self.config.webhook_ca_file,
            first_retry_s=self.config.webhook_retry_s,
        )

    def _probes(self) -> Probes:
        return Probes(
            metrics=self._render_metrics,
            health=self._health,
            readiness=self._readiness,
            startup=self._startup,
        )

    def _live_page(self) -> LivePage | None:
        """Return the page; None if other machines could see it without its being enabled."""
        if not (self.config.live_page or is_loopback(self.config.http_host)):
            return None
        return LivePage(self._live, [self.config.http_host, *self.config.live_page_names()])

    def _live_sources(self) -> LiveSources:
        view = LiveView(self.table, self._clock, show_prompts=self.config.show_prompts)
        return LiveSources(
            worker=self._live_facts,
            engine=lambda: self.engine.stats,
            queue=self._queue_figures,
            around=lambda: self._queue_reader.surroundings() if self.connectivity.is_up else PageLinks(),
            jobs=view.jobs,
            totals=lambda: (
                self.counters.jobs_finished.read()
                | {"retried": sum(self.counters.job_retries.read().values())}
            ),
            ends=self._ends,
            watch_blocks=self.engine.watch_blocks,
        )

    def _live_facts(self) -> WorkerFacts:
        return WorkerFacts(
            id=self.worker_id,
            version=installed_version(),
            state=self._state(),
            queue=self.config.queue,
            uptime_s=time.monotonic() - self._started,
            redis_up=self.connectivity.is_up,
            blocked=self.admission.blocked,
        )

    def _is_engine_well(self) -> bool:
        return self.engine.stalled_for() < self.config.engine_stall_s

    def _describe(self) -> WorkerInfo:
        stats = self.engine.stats
        return WorkerInfo(
            id=self.worker_id,
            models=self.engine.engine.served_models if self._is_serving else (),
            adapters=tuple(one.name for one in self.engine.engine.adapters.registered())
            if self._is_serving
            else (),
            state=self._state(),
            url=self.http_url,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=round(self._clock.now() - time.monotonic() + self._started, 1),
            running=len(self.table),
            max_model_len=self.engine.engine.limits.max_model_len if self._is_serving else None,
            speed=self._speed.speed(stats.loaded.max_num_seqs) if stats is not None else None,
            fingerprints=self._fingerprints() if self._is_serving else {},
            revision=self._revision() if self._is_serving else "",
            knows=known_words(
                has_store=self._has_store, lacks=self.engine.engine.lacks if self._is_serving else ()
            ),
        )

    def _revision(self) -> str:
        return self.config.revision_name or revision_of(self.engine.engine.fingerprint)

    def _fingerprints(self) -> dict[str, str]:
        engine = self.engine.engine
        adapted = {
            one.name: with_adapter(engine.fingerprint, one.digest) for one in engine.adapters.registered()
        }
        return {"": engine.fingerprint, **adapted}

    def _state(self) -> str:
        if not self._is_engine_well():
            return "unhealthy"
        if self._is_draining:
            return "draining"
        if not self._is_serving:
            return "loading"
        return self._pull_state() or "ready"

    def _pull_state(self) -> PullState | None:
        return "quarantined" if self.audit.reason is not None else self._pulling.state

    def _health(self) -> Health:
        """Report the worker as live while the engine makes progress, is idle, or is loading."""
        stalled_s = self.engine.stalled_for()
        reason = self.failure()
        details: dict[str, Any] = {
            "engine": self.engine.state.value,
            "stalled_s": round(min(stalled_s, 1e9), 3),
            "stall_limit_s": self.config.engine_stall_s,
            "running": len(self.table),
        }
        return Health(reason is None, details if reason is None else details | {"reason": reason})

    def _startup(self) -> Health:
        """Report success after the model is loaded: for startup probes, which never restart."""
        return Health(self._is_serving, {"state": self._state(), "model": self.config.engine.model})

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
            details |= {
                "model": self.model,
                "models": engine.served_models,
                "tier": engine.tier,
                "fingerprint": engine.fingerprint,
            }
            details |= {"parts": engine.model_parts} if engine.model_parts else {}
        if self.engine.pid is not None:
            details["engine_pid"] = self.engine.pid
        if self.audit.reason is not None:
            details["reason"] = self.audit.reason
        refusal = self.admission.refusal
        if refusal is not None:
            details["refusal"] = refusal
        # Before that no client finds the model: a gateway would respond that it does not exist.
        announced = self.leases.announced
        details["registered"] = is_registered = announced is not None and announced.state == "ready"
        return Health(
            state == "ready" and is_registered and self.connectivity.is_up and refusal is None, details
        )

    def _render_metrics(self, encode: Encode) -> bytes:
        self.counters.state = self._public_state()
        now = self._clock.now()
        ages = (now - job.started_at for job in self.table.running())
        self.counters.oldest_running_job_s = max(ages, default=0.0)
        return self._metrics.render(encode)

    def _public_state(self) -> WorkerState:
        match self._state():
            case "loading":
                return "starting"
            case "draining" | "drained":
                return "draining"
            case "paused":
                return "paused"
            case "quarantined":
                return "quarantined"
            case "ready" if self.connectivity.is_up and self.admission.refusal is None:
                return "paused" if self.admission.blocked == "paused" else "ready"
        return "degraded"

    def _queue_figures(self) -> QueueFigures | None:
        """Return the queue's statistics; None while Redis is unreachable, since a scrape must not wait for it."""
        return self._queue_reader.read() if self.connectivity.is_up else None

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self.audit.take(outputs)
        self.reporter.deliver(outputs)

    def _on_audited(self) -> None:
        if self.audit.reason is not None:
            self.reporter.distrust_all()
        self.admission.recheck()
        self.leases.announce()

    def _on_finished(self, job: RunningJob | None) -> None:
        self.admission.on_finished(job)
