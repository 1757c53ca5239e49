"""A plugin: check that a run of all tests produced every metric child that workers export from their first scrape.

A child is a series: a metric, or a metric and a label value. The plugin reads the exposition of all tests' workers at
each scrape and before they close. A run appends the observed children to the file in PAGEMILL_PRODUCED_METRICS; once
all parts of `make check-all` have run, a child that never was above 0 fails it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.exporter import NOT_LOADED, WorkerMetrics
from pagemill.monitoring.metrics.metric import Encode
from pagemill.worker.worker import Worker

# These label values name components, not events.
IDENTITIES = {"worker", "queue", "model", "version", "device", "tier", "fingerprint", "dtype"}
NEEDS_A_CARD = re.compile(
    r"engine_graph_steps_total.*graph|engine_replaced_kernels|engine_lost_graphs|device_memory_bytes"
)
"""Produced in tests/engine by the tests' driver, and by a GPU."""
_produced: set[str] = set()


def children(exposition: bytes) -> Iterator[tuple[str, float]]:
    """Yield each series without its worker's identity, and its value."""
    for family in text_string_to_metric_families(exposition.decode()):
        if not family.name.startswith("pagemill_"):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created", "_sum")):
                continue
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in IDENTITIES]
            yield f"{sample.name.removeprefix('pagemill_')}{{{','.join(labels)}}}", sample.value


def expected() -> set[str]:
    empty = WorkerMetrics(WorkerCounters(), lambda: NOT_LOADED, lambda: None)
    return {name for name, _ in children(empty.render()) if not NEEDS_A_CARD.search(name)}


def _record(worker: Worker, encode: Encode = generate_latest) -> bytes:
    exposition = _render(worker, generate_latest)
    _produced.update(name for name, value in children(exposition) if value)
    return exposition if encode is generate_latest else _render(worker, encode)


def _record_and_close(worker: Worker) -> bool:
    _record(worker)
    return _close(worker)


_render, _close = Worker._render_metrics, Worker.close
Worker._render_metrics = _record  # type: ignore[method-assign]
Worker.close = _record_and_close  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Merge the children that another process of this run has seen."""
    _produced.update(getattr(node, "workeroutput", {}).get("produced_metrics", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["produced_metrics"] = sorted(_produced)
    elif path := os.environ.get("PAGEMILL_PRODUCED_METRICS"):
        with Path(path).open("a") as file:
            file.writelines(f"{name}\n" for name in sorted(_produced))


def never_produced(path: Path) -> list[str]:
    """Return the children that occur in no line of the file that the parts of a run have written."""
    produced = path.read_text().splitlines() if path.is_file() else []
    return sorted(expected() - set(produced))
