"""The names, labels and help texts as a catalogue: rules that hold for every metric."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import Histogram
from monitoring.engine_metrics import ENGINE_METRICS, NOT_LOADED
from monitoring.metrics import PREFIX, Metric
from monitoring.queue_figures import QueueFigures
from monitoring.queue_metrics import QUEUE_METRICS
from monitoring.worker_metrics import WORKER_METRICS
from tests.monitoring.snapshots import engine_stats, metrics

CATALOGUE: list[Metric[object]] = [*ENGINE_METRICS, *QUEUE_METRICS, *WORKER_METRICS]  # type: ignore[list-item]
BOUNDED_LABELS = {
    "state", "mode", "phase", "model", "kind", "finish_reason", "queue", "priority",
    "delivery", "outcome", "code", "reason", "result",
}  # fmt: skip


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_name_label_and_help(metric: Metric[object]) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|millis|milliseconds|minutes|percent|mb|gib)(_|$)", metric.name), (
        "not a base unit"
    )
    assert set(metric.labels) <= BOUNDED_LABELS
    assert metric.help.endswith(".")
    assert metric.help[0].isupper() or metric.help[0].isdigit()


def test_names_are_unique() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


def test_the_heart_is_there() -> None:
    names = {metric.name for metric in CATALOGUE}
    assert names >= {
        "kv_cache_blocks",
        "kv_cache_capacity_blocks",
        "kv_cache_utilization_ratio",
        "kv_cache_waste_ratio",
        "kv_cache_shared_blocks",
        "kv_cache_step_utilization_ratio",
        "queue_waiting_jobs",
        "queue_oldest_job_age_seconds",
    }


def test_every_histogram_of_the_engine_has_a_family() -> None:
    """The names that `EngineStats.histograms` documents, each with a count only it has."""
    names = {
        "step_seconds": ("forward", "decode"),
        "step_tokens": ("decode",),
        "step_utilization": (),
        "batch_size": (),
        "time_to_first_token_seconds": (),
        "inter_token_latency_seconds": (),
        "request_seconds": (),
        "prompt_tokens": (),
        "generated_tokens": (),
    }
    histograms = {}
    for i, (name, labels) in enumerate(names.items(), start=1):
        histogram = Histogram((1.0,))
        histogram.observe(0.5, times=i)
        histograms[name] = {labels: histogram.snapshot()}
    engine_names = {metric.name for metric in ENGINE_METRICS}
    text = metrics(engine_stats(histograms=histograms)).render().decode()
    counts = [
        sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "histogram" and family.name.removeprefix(PREFIX) in engine_names
        for sample in family.samples
        if sample.name.endswith("_count")
    ]
    assert sorted(counts) == list(range(1, len(names) + 1))


def test_families_read_their_empty_snapshot() -> None:
    for metric in ENGINE_METRICS:
        metric.family(NOT_LOADED)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed"
)
def test_promtool_finds_nothing() -> None:
    queue = QueueFigures(queue="default", taken_at=1.0, waiting={("m", "normal"): 1})
    exposition = metrics(engine_stats(), queue).render()
    ours = b"".join(line for line in exposition.splitlines(keepends=True) if b"pagemill_" in line)
    checked = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode() + checked.stdout.decode()
