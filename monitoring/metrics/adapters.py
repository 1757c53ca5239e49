"""The metrics of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.engine.outputs import EngineStats
from pagemill.monitoring.metrics.metric import Metric, Number, counter, gauge


def _requests(stats: EngineStats) -> Mapping[str, Number]:
    return dict(stats.adapters.requests.items())


ADAPTERS: tuple[Metric[EngineStats], ...] = (
    gauge("adapters", "Adapters that jobs may name.", lambda s: s.adapters.named),
    gauge("adapters_in_memory", "Adapters in memory.", lambda s: s.adapters.resident),
    gauge("adapter_slots", "Limit of adapters in memory.", lambda s: s.adapters.slots),
    gauge("adapter_memory_bytes", "Bytes of the adapters in memory.", lambda s: s.adapters.used_bytes),
    gauge("adapter_memory_limit_bytes", "Limit of adapter_memory_bytes.", lambda s: s.adapters.capacity_bytes),
    counter("adapter_loads_total", "Adapters read into memory for a request.", lambda s: s.adapters.loads),
    counter("adapter_evictions_total", "Adapters evicted for another. If frequent, raise adapter_slots.",
        lambda s: s.adapters.evictions),
    counter("adapter_requests_total",
        "Requests accepted by adapter; a series ends with the adapter's removal.", _requests,
        "adapter"),
)  # fmt: skip
