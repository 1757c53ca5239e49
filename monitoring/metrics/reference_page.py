"""Writes docs/metrics.md from the catalogue: `python -m pagemill.monitoring.metrics.reference_page [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.catalogue import SECTIONS
from pagemill.monitoring.metrics.exporter import NOT_LOADED
from pagemill.monitoring.metrics.gateway import GatewayMetrics
from pagemill.monitoring.metrics.metric import Metric
from pagemill.monitoring.metrics.scrape import ScrapeFigures, WorkerIdentity
from pagemill.monitoring.metrics.vllm_names import ALIASES
from pagemill.monitoring.queue_figures import QueueFigures, UsageFigures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

INTRO = """\
# Metrics

What a worker serves at `/metrics`, and at the end what a gateway does. Generated from the catalogue in `monitoring/` by
`python -m pagemill.monitoring.metrics.reference_page`: change the metric, not this page.

Units are base units, counters end in `_total`, and no label carries a job, a tenant or a batch. Counters and gauges are
there from the first scrape, at 0. Values are read from immutable snapshots when Prometheus asks, so one scrape is one
moment, and nothing in the engine's steps waits for it.
"""

VLLM_INTRO = """\
With `--vllm-metric-names` a worker also exports these, with the labels `model_name` and `engine`, for boards and
autoscalers that were made for vLLM.
"""

MISSING = """\
## Not exported, and why

| metric | why |
| --- | --- |
| submits that were refused | they are refused in the producer's process, which has no `/metrics`; its errors say so |
| engine restarts | an engine that fails ends its process; the supervisor counts restarts |
| progress events dropped | none is: what Redis does not take yet is held and merged |
| GPU clocks, power, temperature | the DCGM exporter has them |
| Redis commands by name as the server sees them | the Redis exporter has them |
"""

DEPLOYED = frozenset({"block_size", "num_gpu_blocks", "cache_dtype", "model_name", "engine"})
"""Labels whose values depend on the deployment."""
SOURCES: Mapping[str, object] = {
    "engine": NOT_LOADED,
    "queue": QueueFigures(
        queue="",
        taken_at=0.0,
        serving={"": 1},
        drain_seconds=0.0,
        usage=UsageFigures(tokens={}, device_seconds=0.0, tenants_over_quota=0),
    ),
    "worker": WorkerCounters(),
    "scrape": ScrapeFigures(
        identity=WorkerIdentity(),
        engine=NOT_LOADED,
        last_step_unix=0.0,
        accounting_errors=0,
        source_errors={"engine": 0, "queue": 0},
    ),
    "gateway": GatewayMetrics(),
}
"""Empty snapshots, which reveal the label values that always exist."""


def page() -> str:
    """Return the page's expected text."""
    parts = [INTRO]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        if section.intro:
            parts.append(section.intro + "\n")
        parts.append(_table(section.metrics, SOURCES[section.source]))
    parts += ["## Under vLLM's names\n", VLLM_INTRO, _table(ALIASES, NOT_LOADED), MISSING]
    return "\n".join(parts)


def _table(metrics: Iterable[Metric[Any]], source: object) -> str:
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(_label(metric, name, source) for name in metric.labels)
        rows.append(f"| `{metric.prefix}{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


def _label(metric: Metric[Any], name: str, source: object) -> str:
    """Return a label and its values, if the catalogue fixes them."""
    samples = metric.family(source).samples
    values = [value for value in dict.fromkeys(sample.labels[name] for sample in samples) if value]
    return f"`{name}` ({', '.join(values)})" if values and name not in DEPLOYED else f"`{name}`"


def main() -> int:
    wanted = page()
    is_fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == wanted
    if "--check" in sys.argv[1:]:
        if not is_fresh:
            sys.stderr.write(f"{PAGE} is stale; run python -m pagemill.monitoring.metrics.reference_page\n")
        return int(not is_fresh)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
