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
    gauge("adapter_slots", "The most adapters in memory at a time.", lambda s: s.adapters.slots),
    gauge("adapter_memory_bytes", "Bytes of the adapters in memory.", lambda s: s.adapters.used_bytes),
    gauge("adapter_memory_limit_bytes", "The most bytes of them.", lambda s: s.adapters.capacity_bytes),
    counter("adapter_loads_total", "Adapters read into memory for a request.", lambda s: s.adapters.loads),
    counter(
        "adapter_evictions_total",
        "Adapters that made room for another. Often: raise adapter_slots.",
        lambda s: s.adapters.evictions,
    ),
    counter(
        "adapter_requests_total",
        "Requests accepted with an adapter, by its name; a name's series ends with its removal.",
        _requests,
        "adapter",
    ),
)
