"""The scrape's own metrics: the worker's identity, its versions, and accounting errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagemill.engine.outputs import EngineStats
from pagemill.monitoring.metrics.metric import Labels, Metric, Number, counter, gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A worker's identity, constant for its lifetime."""

    worker: str = ""
    queue: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeFigures:
    """Metrics of one scrape."""

    identity: WorkerIdentity
    engine: EngineStats | None
    """None while the model is being loaded."""
    last_step_unix: float
    accounting_errors: int
    source_errors: Mapping[str, int]


def _worker_info(figures: ScrapeFigures) -> Mapping[Labels, Number]:
    identity, engine = figures.identity, figures.engine
    return {(identity.worker, identity.queue, engine.loaded.model if engine else "", identity.version): 1}


def _engine_info(figures: ScrapeFigures) -> Mapping[Labels, Number]:
    if figures.engine is None:
        return {}
    loaded = figures.engine.loaded
    return {(loaded.model, loaded.device, loaded.tier, loaded.fingerprint): 1}


def _kv_cache_info(figures: ScrapeFigures) -> Mapping[Labels, Number]:
    engine = figures.engine
    if engine is None or engine.known is not None:
        return {}
    return {(engine.kv.dtype, engine.loaded.device): 1}


SCRAPE_METRICS: tuple[Metric[ScrapeFigures], ...] = (
    gauge("worker_info", "Worker metadata in labels, for joins on `instance`; value is always 1. model: empty "
        "during loading.",
        _worker_info, "worker", "queue", "model", "version"),
    gauge("engine_info", "Model and device of the engine in labels; value is always 1.", _engine_info,
        "model", "device", "tier", "fingerprint"),
    gauge("kv_cache_info", "Storage of keys and values in labels; value is always 1.", _kv_cache_info, "dtype",
        "device"),
    gauge("engine_last_step_timestamp_seconds",
        "Unix time at which the last engine step finished, in seconds; 0 before the first.",
        lambda f: f.last_step_unix),
    counter("kv_cache_accounting_errors_total",
        "Number of contradictions in snapshots of the KV block pool. Above 0: a bug.",
        lambda f: f.accounting_errors),
    counter("scrape_source_errors_total", "Number of scrapes in which a source failed.",
        lambda f: f.source_errors, "source"),
    gauge("build_info", "Running version in a label; value is always 1.",
        lambda f: {f.identity.version: 1}, "version"),
)  # fmt: skip
