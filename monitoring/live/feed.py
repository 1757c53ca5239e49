"""The data of the live page and `pagemill top`: one JSON document per second, built once for all watchers.

It does not depend on Redis or jobs' prompts; the worker supplies the data (`LiveSources`). Without
watchers only the history is updated, at the cost of reading one snapshot per second.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pagemill.engine.outputs import BlockMap, EngineStats
from pagemill.monitoring.live.history import LiveHistory
from pagemill.monitoring.live.job_ends import DatedEnd, JobEnds
from pagemill.monitoring.queue_figures import QueueFigures

logger = logging.getLogger(__name__)

TICK_S = 1.0
QUEUE_UNWATCHED_S = 10.0
"""Interval of Redis reads for the chart alone."""
WATCH_S = 5.0
"""The time for which a read keeps the block map fresh."""
MAX_WATCHERS = 32
MAX_JOBS = 100
MAX_WORKERS = 100
_RUN = re.compile(rb"(.)\1*")


class TooManyWatchers(Exception):
    """`MAX_WATCHERS` pages are already open; each takes a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker's state at one moment."""

    id: str
    version: str
    state: str
    queue: str
    uptime_s: float
    redis_up: bool
    blocked: str | None
    """The reason why no job is pulled, if any."""


@dataclass(frozen=True, slots=True)
class OtherWorker:
    """A live worker of the queue, as of its heartbeat."""

    id: str
    state: str
    models: Sequence[str]
    running: int
    url: str | None


@dataclass(frozen=True, slots=True)
class PageLinks:
    """Links of the page: the queue's workers, including this one, and the page of jobs ('' for none)."""

    workers: Sequence[OtherWorker] = ()
    jobs_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One running job. `prompt` is None unless showing prompts is enabled."""

    id: str
    token: int
    """The fencing token of this execution."""
    phase: str
    prompt_tokens_done: int
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    age_s: float
    attempt: int
    crashes: int
    priority: str
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSources:
    """The data sources. Called on the feed's thread; only `queue` and `around` may block, up to a timeout."""

    worker: Callable[[], WorkerFacts]
    engine: Callable[[], EngineStats | None]
    queue: Callable[[], QueueFigures | None]
    around: Callable[[], PageLinks]
    jobs: Callable[[], Sequence[JobRow]]
    """Oldest first."""
    totals: Callable[[], Mapping[str, float]]
    """Completions on this worker by outcome, and retries."""
    ends: JobEnds
    watch_blocks: Callable[[float], None]
    """Asks the engine for block maps for this many seconds."""


class LiveFeed:
    """Samples once per second on a separate thread, and notifies every watcher."""

    def __init__(self, sources: LiveSources, *, tick_s: float = TICK_S) -> None:
        self._sources = sources
        self._tick_s = tick_s
        self._history = LiveHistory()
        self._queue: QueueFigures | None = None
        self._around = PageLinks()
        self._queue_due = 0.0
        self._looked_at = 0.0
        self._watchers = 0
        self._news = threading.Condition()
        self._latest: bytes = b""
        self._version = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-live", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every stream and stop the thread."""
        self._is_closed.set()
        with self._news:
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * self._tick_s)

    def document(self) -> bytes:
        """Return the current state with its history, as one JSON object. Also keeps the block map fresh."""
        self._request_maps()
        return _json(self._state() | {"history": self._history.columns()})

    @contextmanager
    def watch(self) -> Iterator[Iterator[bytes]]:
        """Stream server-sent events: `history` once, then `state` every second until the feed is closed.

        Raises TooManyWatchers.
        """
        with self._news:
            if self._watchers >= MAX_WATCHERS:
                raise TooManyWatchers
            self._watchers += 1
        try:
            yield self._events()
        finally:
            with self._news:
                self._watchers -= 1

    def _events(self) -> Iterator[bytes]:
        self._request_maps()
        version = self._version
        yield _event("history", _json(self._history.columns()))
        yield _event("state", _json(self._state()))
        while (news := self._wait(version)) is not None:
            version, state = news
            yield _event("state", state)

    def _wait(self, version: int) -> tuple[int, bytes] | None:
        """Return the next state after `version`; None once the feed is closed."""
        with self._news:
            self._news.wait_for(lambda: self._is_closed.is_set() or self._version > version)
            return None if self._is_closed.is_set() else (self._version, self._latest)

    def _request_maps(self) -> None:
        self._looked_at = time.monotonic()
        self._sources.watch_blocks(WATCH_S)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._is_closed.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._tick_s, time.monotonic())
            try:
                self._tick()
            except Exception:
                logger.exception("the live page missed a second")

    def _tick(self) -> None:
        self._read_queue()
        queued = None if self._queue is None else sum(self._queue.waiting.values())
        self._history.sample(self._sources.engine(), queued)
        if not self._watchers:
            return
        self._request_maps()
        state = _json(self._state())
        with self._news:
            self._version += 1
            self._latest = state
            self._news.notify_all()

    def _read_queue(self) -> None:
        now = time.monotonic()
        is_watched = self._watchers or now - self._looked_at < WATCH_S
        if not is_watched and now < self._queue_due:
            return
        self._queue_due = now + QUEUE_UNWATCHED_S
        try:
            self._queue = self._sources.queue()
            self._around = self._sources.around()
        except Exception:
            logger.debug("the live page continues without the queue's figures", exc_info=True)
            self._queue = None

    def _state(self) -> dict[str, Any]:
        stats = self._sources.engine()
        jobs = self._sources.jobs()
        return {
            "time": time.time(),
            "worker": asdict(self._sources.worker()),
            "engine": None if stats is None else _engine(stats),
            "kv": None if stats is None else _kv(stats),
            "queue": None if self._queue is None else _queue(self._queue),
            "workers": [asdict(worker) for worker in self._around.workers[:MAX_WORKERS]],
            "jobs_url": self._around.jobs_url,
            "totals": dict(self._sources.totals()),
            "jobs": {"total": len(jobs), "shown": [asdict(job) for job in jobs[:MAX_JOBS]]},
            "ends": [_end(dated) for dated in self._sources.ends.ends()],
            "errors": [_end(dated) for dated in self._sources.ends.errors()],
            "blocks": None if stats is None or stats.blocks is None else {"runs": pack(stats.blocks)},
            "point": self._history.latest,
        }


def pack(blocks: BlockMap) -> str:
    """Run-length encode: `fffaas` becomes `3f2as`."""
    return "".join(
        f"{length if (length := len(run.group())) > 1 else ''}{run.group()[:1].decode()}"
        for run in _RUN.finditer(blocks.states)
    )


def _end(dated: DatedEnd) -> dict[str, Any]:
    end = dated.end
    return {
        "number": dated.number,
        "ago_s": round(dated.ago_s, 1),
        "id": end.job_id,
        "outcome": end.outcome,
        "tokens": end.tokens,
        "took_s": round(end.took_s, 3),
        "code": end.code,
        "message": end.message,
    }


def _engine(stats: EngineStats) -> dict[str, Any]:
    return {
        "model": stats.loaded.model,
        "device": stats.loaded.device,
        "tier": stats.loaded.tier,
        "max_num_seqs": stats.loaded.max_num_seqs,
        "max_model_len": stats.loaded.max_model_len,
        "running": stats.scheduler.running,
        "waiting": stats.scheduler.waiting,
        "preemptions": stats.scheduler.preemptions,
        "steps": stats.steps.finished,
        "last_step_age_s": round(time.monotonic() - stats.steps.last_time, 3)
        if stats.steps.last_time
        else None,
        "generated_tokens": stats.requests.generated_tokens,
        "prompt_tokens": stats.requests.prompt_tokens,
        "computed_tokens": stats.steps.computed_tokens,
    }


def _kv(stats: EngineStats) -> dict[str, Any]:
    kv = stats.kv
    return {
        "capacity": kv.capacity_blocks,
        "block_size": kv.block_size,
        "free": kv.free_blocks,
        "cached": kv.cached_blocks,
        "active": kv.active_blocks,
        "reserved": kv.reserved_blocks,
        "shared": kv.shared_blocks,
        "utilization": round(kv.utilization, 4),
        "peak": round(stats.steps.peak_utilization, 4),
        "waste": round(kv.waste, 4),
        "evictions": kv.evictions,
        "cow_copies": kv.cow_copies,
        "windows": [{"window": window, "active": blocks} for window, blocks in kv.active_by_window()],
        "window_frees": kv.window_frees,
        "prefix_queried_tokens": kv.prefix_queried_tokens,
        "prefix_hit_tokens": kv.prefix_hit_tokens,
    }


def _queue(figures: QueueFigures) -> dict[str, Any]:
    return {
        "queue": figures.queue,
        "queued": sum(figures.waiting.values()),
        "oldest_s": max(figures.oldest_age_seconds.values(), default=0.0),
        "delayed": figures.delayed,
        "running": figures.running,
        "dead": figures.dead,
        "paused": figures.paused,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _event(name: str, data: bytes) -> bytes:
    # JSON does not contain raw line breaks, so one data line holds it.
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
