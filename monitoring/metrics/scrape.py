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
    gauge("worker_info", "Always 1; identity of the worker, for joins on `instance`. model: empty during loading.",
        _worker_info, "worker", "queue", "model", "version"),
    gauge("engine_info", "Always 1; model and device of the engine.", _engine_info,
        "model", "device", "tier", "fingerprint"),
    gauge("kv_cache_info", "Always 1; storage of keys and values.", _kv_cache_info, "dtype",
        "device"),
    gauge("engine_last_step_timestamp_seconds", "Time at which the last engine step finished; 0 before the first.",
        lambda f: f.last_step_unix),
    counter("kv_cache_accounting_errors_total",
        "Contradictions in snapshots of the KV block pool. Above 0: a bug.",
        lambda f: f.accounting_errors),
    counter("scrape_source_errors_total", "Scrapes without a source that failed.",
        lambda f: f.source_errors, "source"),
    gauge("build_info", "Always 1; the running version.", lambda f: {f.identity.version: 1}, "version"),
)  # fmt: skip
