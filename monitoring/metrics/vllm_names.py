"""vLLM's metrics under their original names, so that dashboards and autoscalers for it work unchanged.

Colons are reserved for recording rules, so these are off by default (`--vllm-metric-names`). Names, labels
and units are those of vLLM's V1 engine; there is one engine per worker, `engine="0"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric as Family

from pagemill.engine.outputs import EngineStats, HistogramSnapshot
from pagemill.monitoring.metrics.metric import Figure, Labels, Metric, Number, labeled

PREFIX = "vllm:"
LABELS = ("model_name", "engine")

Read = Callable[[EngineStats], Figure]
"""Readers omit the labels with which every metric here starts."""

_WAIT_REASONS = {"kv": "capacity", "rows": "capacity", "budget": "deferred"}


def _waiting_by_reason(stats: EngineStats) -> Mapping[str, Number]:
    waiting = dict.fromkeys(_WAIT_REASONS.values(), 0)
    waiting[_WAIT_REASONS[stats.scheduler.waiting_for]] += stats.scheduler.waiting
    return waiting


def _cache_config(stats: EngineStats) -> Mapping[Labels, Number]:
    kv = stats.kv
    return {(str(kv.block_size), str(kv.capacity_blocks), kv.dtype or "auto"): 1}


def _host_usage(stats: EngineStats) -> float:
    return stats.kv.host_used_blocks / max(1, stats.kv.host_capacity_blocks)


def _labeled(stats: EngineStats, figure: Figure) -> Mapping[Labels, Number]:
    return labeled((stats.loaded.model, "0"), figure)


def _gauge(name: str, help: str, read: Read, *labels: str) -> Metric[EngineStats]:
    return Metric("gauge", name, help, lambda s: _labeled(s, read(s)), (*LABELS, *labels), PREFIX)


def _counter(name: str, help: str, read: Read, *labels: str) -> Metric[EngineStats]:
    return Metric("counter", name, help, lambda s: _labeled(s, read(s)), (*LABELS, *labels), PREFIX)


def _histogram(name: str, help: str, source: str) -> Metric[EngineStats]:
    def read(stats: EngineStats) -> Mapping[Labels, HistogramSnapshot]:
        children = list(stats.histograms.get(source, {}).values())
        return {(stats.loaded.model, "0"): _merged(children)} if children else {}

    return Metric("histogram", name, help, read, LABELS, PREFIX)


def _merged(children: list[HistogramSnapshot]) -> HistogramSnapshot:
    """Merge histograms that have the same bounds."""
    bounds = children[0].bounds
    assert all(child.bounds == bounds for child in children)
    counts = tuple(sum(counts) for counts in zip(*(child.counts for child in children), strict=True))
    return HistogramSnapshot(bounds, counts, sum(child.total for child in children))


ALIASES: tuple[Metric[EngineStats], ...] = (
    _gauge("num_requests_running", "Number of sequences in the batch.", lambda s: s.scheduler.running),
    _gauge("num_requests_waiting", "Number of requests that wait.", lambda s: s.scheduler.waiting),
    _gauge("num_requests_waiting_by_reason", "Number of requests that wait.", _waiting_by_reason, "reason"),
    _gauge("kv_cache_usage_perc", "Fraction of KV blocks that are active, 0 to 1.", lambda s: s.kv.utilization),
    _gauge("cache_config_info", "Shape of the KV cache in labels; value is always 1.", _cache_config,
           "block_size", "num_gpu_blocks", "cache_dtype"),
    _counter("prefix_cache_queries_total", "Number of tokens looked up in the prefix cache.",
             lambda s: s.kv.prefix_queried_tokens),
    _counter("prefix_cache_hits_total", "Number of tokens found in the prefix cache.",
             lambda s: s.kv.prefix_hit_tokens),
    _counter("num_preemptions_total", "Number of sequences preempted.", lambda s: s.scheduler.preemptions),
    _counter("prompt_tokens_total", "Number of prompt tokens.", lambda s: s.requests.prompt_tokens),
    _counter("prompt_tokens_cached_total", "Number of prompt tokens found in the prefix cache.",
             lambda s: s.requests.prompt_tokens_by_source.get("prefix_cache", 0)),
    _counter("generation_tokens_total", "Number of tokens generated.", lambda s: s.requests.generated_tokens),
    _counter("request_success_total", "Number of completed requests by finish reason.",
             lambda s: dict(s.requests.finished), "finished_reason"),
    _counter("corrupted_requests_total", "Number of rows whose logits were not finite.",
             lambda s: s.scheduler.invalid_logits),
    _counter("spec_decode_num_draft_tokens_total", "Number of tokens drafted.",
             lambda s: s.scheduler.drafted_tokens),
    _counter("spec_decode_num_accepted_tokens_total", "Number of drafted tokens accepted.",
             lambda s: s.scheduler.accepted_tokens),
    _histogram("iteration_tokens_total", "Number of tokens in a step.", "step_tokens"),
    _histogram("time_to_first_token_seconds", "Time from acceptance to the first token, in seconds.",
             "time_to_first_token_seconds"),
    _histogram("inter_token_latency_seconds", "Time from a token to the next, in seconds.",
             "inter_token_latency_seconds"),
    _histogram("request_time_per_output_token_seconds", "Mean time between the tokens of a request, in seconds.",
             "time_per_output_token_seconds"),
    _histogram("e2e_request_latency_seconds", "Time from acceptance to the last token, in seconds.",
             "request_seconds"),
    _histogram("request_queue_time_seconds", "Time from acceptance to the first step, in seconds.",
             "request_wait_seconds"),
    _histogram("request_inference_time_seconds", "Time from the first step to the last token, in seconds.",
             "request_inference_seconds"),
    _histogram("request_prefill_time_seconds", "Time from the first step to the first token, in seconds.",
             "request_prefill_seconds"),
    _histogram("request_decode_time_seconds", "Time from the first to the last token, in seconds.",
             "request_decode_seconds"),
    _histogram("request_prompt_tokens", "Number of prompt tokens of a request.", "prompt_tokens"),
    _histogram("request_generation_tokens", "Number of tokens generated.", "generated_tokens"),
    _histogram("request_max_num_generation_tokens", "Number of tokens of a request's longest sample.",
             "longest_sample_tokens"),
    _histogram("request_params_n", "Number of samples of a request (n).", "request_samples"),
    _histogram("request_params_max_tokens", "Value of max_tokens of a request.", "request_max_tokens"),
    _histogram("kv_block_lifetime_seconds", "Time from allocation to eviction, in seconds.",
             "block_lifetime_seconds"),
    _histogram("kv_block_idle_before_evict_seconds", "Time from the last use to eviction, in seconds.",
             "block_idle_seconds"),
    _histogram("kv_block_reuse_gap_seconds", "Time from the last use to reuse, in seconds.",
             "block_reuse_gap_seconds"),
    # Names that vLLM has removed, which its older dashboards still query.
    _gauge("num_requests_swapped", "Number of swapped requests, always 0: preempted sequences wait without blocks.",
             lambda s: 0),
    _gauge("gpu_cache_usage_perc", "Fraction of KV blocks that are active, 0 to 1.", lambda s: s.kv.utilization),
    _gauge("cpu_cache_usage_perc", "Fraction of the host tier's blocks in use, 0 to 1.", _host_usage),
    _histogram("time_per_output_token_seconds", "Time from a token to the next, in seconds.",
             "inter_token_latency_seconds"),
)  # fmt: skip


def vllm_families(stats: EngineStats) -> Iterator[Family]:
    """Yield the snapshot's families under vLLM's names."""
    return (alias.family(stats) for alias in ALIASES)
