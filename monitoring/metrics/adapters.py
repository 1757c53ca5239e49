"""The metrics of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.engine.outputs import EngineStats
from pagemill.monitoring.metrics.metric import Metric, Number, counter, gauge


def _requests(stats: EngineStats) -> Mapping[str, Number]:
    return dict(stats.adapters.requests.items())


ADAPTERS: tuple[Metric[EngineStats], ...] = (
    gauge("adapters", "Number of adapters that jobs can name.", lambda s: s.adapters.named),
    gauge("adapters_in_memory", "Number of adapters in memory.", lambda s: s.adapters.resident),
    gauge("adapter_slots", "Maximum number of adapters in memory.", lambda s: s.adapters.slots),
    gauge("adapter_memory_bytes", "Size of the adapters in memory, in bytes.", lambda s: s.adapters.used_bytes),
    gauge("adapter_memory_limit_bytes", "Limit of adapter_memory_bytes, in bytes.",
        lambda s: s.adapters.capacity_bytes),
    counter("adapter_loads_total", "Number of adapters read into memory for a request.", lambda s: s.adapters.loads),
    counter("adapter_evictions_total",
        "Number of adapters evicted for another one. If frequent, raise adapter_slots.",
        lambda s: s.adapters.evictions),
    counter("adapter_requests_total",
        "Number of requests accepted, by adapter; a series ends with the adapter's removal.", _requests,
        "adapter"),
)  # fmt: skip
