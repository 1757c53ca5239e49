"""Writes docs/metrics.md from the catalogue: `python -m pagemill.monitoring.metrics.reference_page [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
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

For operators: the metrics of a worker at `/metrics`, and at the end those of a gateway.
`python -m pagemill.monitoring.metrics.reference_page` generates this page from the catalogue in `monitoring/`.

Names that end in `_total` are counters unless marked *histogram*; other metrics without a mark are gauges.
Labels follow the name, with their values in parentheses. No label contains a job, a tenant or a batch.
Values have base units. Counters and gauges exist from the first scrape, at 0.
All values of a scrape are from one moment.
"""

VLLM_INTRO = """\
With `--vllm-metric-names` a worker also exports these, with vLLM's labels and meanings.
`vllm:num_requests_swapped` is always 0.
"""

MISSING = """\
## Not exported

| Metric | Reason |
| --- | --- |
| rejected submissions | the producer's process has no `/metrics` |
| engine restarts | a failed engine ends its process; the supervisor counts restarts |
| GPU clocks, power, temperature | use the DCGM exporter |
| Redis commands by name | use the Redis exporter |
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
        parts.append(_list(section.metrics, SOURCES[section.source]))
    parts += ["## Under vLLM's names\n", VLLM_INTRO, _aliases(), MISSING]
    return "\n".join(parts)


def _aliases() -> str:
    lines = []
    for kind in dict.fromkeys(metric.kind for metric in ALIASES):
        names = [f"`{metric.prefix}{metric.name}`" for metric in ALIASES if metric.kind == kind]
        lines.append(_item(f"{kind}: {', '.join(names)}"))
    return "\n".join(lines) + "\n"


def _list(metrics: Sequence[Metric[Any]], source: object) -> str:
    """Return a line per metric: its name, type and labels, except those that all of them have, and its meaning."""
    shared = [name for name in metrics[0].labels if all(name in metric.labels for metric in metrics)]
    lines = [f"Labels of each metric: {', '.join(f'`{name}`' for name in shared)}.\n"] if shared else []
    for metric in metrics:
        labels = [_label(metric, name, source) for name in metric.labels if name not in shared]
        mark = " *histogram*" if metric.kind == "histogram" else ""
        name = ", ".join([f"`{metric.prefix}{metric.name}`{mark}", *labels])
        lines.append(_item(f"{name}: {metric.help}"))
    return "\n".join(lines) + "\n"


def _item(text: str) -> str:
    return fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


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
