"""The names, labels and help texts as a catalogue: rules that hold for every metric."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.outputs import Histogram
from pagemill.engine.sampling_params import SamplingParams
from pagemill.monitoring.metrics.catalogue import CATALOGUE
from pagemill.monitoring.metrics.engine import ENGINE_METRICS
from pagemill.monitoring.metrics.exporter import NOT_LOADED
from pagemill.monitoring.metrics.kv_cache import KV_CACHE_METRICS
from pagemill.monitoring.metrics.metric import PREFIX, Metric
from pagemill.monitoring.metrics.vllm_names import ALIASES
from pagemill.monitoring.queue_figures import QueueFigures
from tests.monitoring.prometheus_server import promtool
from tests.monitoring.snapshots import engine_stats, metrics, scrape

ENGINES_OWN = (*KV_CACHE_METRICS, *ENGINE_METRICS)
BOUNDED_LABELS = {
    "state", "mode", "phase", "kind", "finish_reason", "queue", "priority", "delivery", "outcome", "code",
    "reason", "result", "cause", "direction", "source", "use", "command", "model", "device", "dtype", "tier",
    "fingerprint", "version", "worker", "route", "method", "status", "task", "adapter", "window",
    "side", "quantile",
}  # fmt: skip
INFO_ONLY = {"device", "dtype", "tier", "fingerprint", "version", "worker"}
"""Labels that change with a restart or a deployment: only series with value 1 may have them."""


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_name_label_and_help(metric: Metric[object]) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|millis|milliseconds|minutes|percent|mb|gib)(_|$)", metric.name), (
        "not a base unit"
    )
    assert set(metric.labels) <= BOUNDED_LABELS
    assert metric.name.endswith("_info") or not set(metric.labels) & INFO_ONLY


def test_every_help_follows_its_template() -> None:
    assert [metric.name for metric in (*CATALOGUE, *ALIASES) if not follows_template(metric)] == []


def follows_template(metric: Metric[object]) -> bool:
    text = metric.help
    if metric.name.endswith("_info"):
        pattern = r".* in (a )?labels?\b.*; value is always 1\."
    elif text.startswith("Whether "):
        pattern = r".* \(1\) or not \(0\)\.$"
    elif re.search("_(ratio|perc)$", metric.name):
        pattern = r"(Highest f|F)raction of .*, 0 to 1[;.]|Ratio of "
    elif "_seconds" in metric.name:
        pattern = r".*, in seconds\b"
    elif "_bytes" in metric.name:
        pattern = r"(Size|Memory|Limit)\b.* in bytes\b"
    else:
        pattern = "(Number|Peak number|Maximum number|Value|Fraction) of "
    return text.endswith(".") and re.match(pattern, text) is not None


def test_names_are_unique() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


def test_the_heart_is_there() -> None:
    names = {metric.name for metric in CATALOGUE}
    assert names >= {
        "kv_cache_blocks", "kv_cache_capacity_blocks", "kv_cache_utilization_ratio", "kv_cache_waste_ratio",
        "kv_cache_shared_blocks", "kv_cache_step_utilization_ratio", "queue_waiting_jobs",
        "queue_oldest_job_age_seconds",
    }  # fmt: skip


def test_every_histogram_of_the_engine_has_a_family() -> None:
    """Each histogram of a real engine gets a unique count, and every count is exported."""
    engine = Engine.from_config(EngineConfig(model="echo"))
    shapes = {name: next(iter(children)) for name, children in engine.stats().histograms.items()}
    histograms = {}
    for i, (name, labels) in enumerate(shapes.items(), start=1):
        histogram = Histogram((1.0,))
        histogram.observe(0.5, times=i)
        histograms[name] = {labels: histogram.snapshot()}
    engine_names = {metric.name for metric in ENGINES_OWN}
    text = metrics(engine_stats(histograms=histograms)).render().decode()
    counts = [
        sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "histogram" and family.name.removeprefix(PREFIX) in engine_names
        for sample in family.samples
        if sample.name.endswith("_count")
    ]
    assert sorted(counts) == list(range(1, len(shapes) + 1))


def test_families_read_their_empty_snapshot() -> None:
    for metric in (*ENGINES_OWN, *ALIASES):
        metric.family(NOT_LOADED)


def test_vllms_names_are_there_only_when_asked_for() -> None:
    assert not any(name.startswith("vllm:") for name, _ in scrape(metrics(engine_stats())))
    samples = scrape(metrics(engine_stats(), vllm_names=True))
    labels = frozenset({("model_name", "smollm2"), ("engine", "0")})
    assert samples["vllm:kv_cache_usage_perc", labels] == pytest.approx(0.3)
    assert samples["vllm:num_requests_running", labels] == 2
    assert samples["vllm:num_requests_waiting", labels] == 1
    assert samples["vllm:generation_tokens_total", labels] == 123
    assert samples["vllm:num_preemptions_total", labels] == 4
    assert samples["vllm:request_success_total", labels | {("finished_reason", "stop")}] == 5
    waiting = {
        dict(found)["reason"]: number
        for (name, found), number in samples.items()
        if name == "vllm:num_requests_waiting_by_reason"
    }
    assert sum(waiting.values()) == 1
    assert samples["vllm:iteration_tokens_total_count", labels] == 3


def test_promtool_finds_nothing() -> None:
    queue = QueueFigures(queue="default", taken_at=1.0, waiting={("m", "normal"): 1})
    exposition = metrics(engine_stats(), queue).render().decode()
    ours = "".join(line for line in exposition.splitlines(keepends=True) if "pagemill_" in line)
    checked = promtool("check", "metrics", stdin=ours)
    assert checked.returncode == 0, checked.stderr + checked.stdout


VLLM_BOARD = [
    *(f"{name}_{part}" for part in ("bucket", "sum", "count") for name in (
        "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
        "time_to_first_token_seconds",
    )),
    "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "num_requests_running", "num_requests_waiting", "num_requests_swapped",
    "kv_cache_usage_perc", "gpu_cache_usage_perc", "cpu_cache_usage_perc",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum",
]  # fmt: skip
"""The metrics that vLLM's published dashboard queries, in its versions from 0.5 to today."""


def test_vllms_board_finds_every_series_that_it_asks_for() -> None:
    engine = Engine.from_config(EngineConfig(model="echo"))
    for number in range(2):
        engine.add_request(str(number), [65, 66, 67], SamplingParams(n=2, max_tokens=8))
    while engine.has_unfinished():
        engine.step()
    samples = scrape(metrics(engine.stats(), vllm_names=True))
    names = {name for name, _ in samples}
    assert [name for name in VLLM_BOARD if f"vllm:{name}" not in names] == []
    labels = frozenset({("model_name", "echo"), ("engine", "0")})
    assert samples["vllm:request_max_num_generation_tokens_count", labels] == 2
    assert (
        samples["vllm:request_generation_tokens_sum", labels]
        == 2 * samples["vllm:request_max_num_generation_tokens_sum", labels]
    )
