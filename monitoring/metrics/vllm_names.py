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
    _gauge("num_requests_running", "Sequences in the batch.", lambda s: s.scheduler.running),
    _gauge("num_requests_waiting", "Requests that wait.", lambda s: s.scheduler.waiting),
    _gauge("num_requests_waiting_by_reason", "Requests that wait.", _waiting_by_reason, "reason"),
    _gauge("kv_cache_usage_perc", "Active KV blocks / capacity.", lambda s: s.kv.utilization),
    _gauge("cache_config_info", "1; the KV cache's shape.", _cache_config,
           "block_size", "num_gpu_blocks", "cache_dtype"),
    _counter("prefix_cache_queries_total", "Tokens looked up.", lambda s: s.kv.prefix_queried_tokens),
    _counter("prefix_cache_hits_total", "Tokens found.", lambda s: s.kv.prefix_hit_tokens),
    _counter("num_preemptions_total", "Preemptions.", lambda s: s.scheduler.preemptions),
    _counter("prompt_tokens_total", "Prompt tokens.", lambda s: s.requests.prompt_tokens),
    _counter("prompt_tokens_cached_total", "Prompt tokens that were cached.",
             lambda s: s.requests.prompt_tokens_by_source.get("prefix_cache", 0)),
    _counter("generation_tokens_total", "Tokens generated.", lambda s: s.requests.generated_tokens),
    _counter("request_success_total", "Requests by how they ended.", lambda s: dict(s.requests.finished),
             "finished_reason"),
    _counter("corrupted_requests_total", "Requests whose logits were not finite.",
             lambda s: s.scheduler.invalid_logits),
    _counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", lambda s: s.scheduler.drafted_tokens),
    _counter("spec_decode_num_accepted_tokens_total", "Drafts sampled.", lambda s: s.scheduler.accepted_tokens),
    _histogram("iteration_tokens_total", "Tokens in a step.", "step_tokens"),
    _histogram("time_to_first_token_seconds", "Time to the first token.", "time_to_first_token_seconds"),
    _histogram("inter_token_latency_seconds", "Between two tokens.", "inter_token_latency_seconds"),
    _histogram("request_time_per_output_token_seconds", "Mean per request.", "time_per_output_token_seconds"),
    _histogram("e2e_request_latency_seconds", "Acceptance to last token.", "request_seconds"),
    _histogram("request_queue_time_seconds", "Acceptance to first step.", "request_wait_seconds"),
    _histogram("request_inference_time_seconds", "First step to last token.", "request_inference_seconds"),
    _histogram("request_prefill_time_seconds", "First step to first token.", "request_prefill_seconds"),
    _histogram("request_decode_time_seconds", "First to last token.", "request_decode_seconds"),
    _histogram("request_prompt_tokens", "Prompt length.", "prompt_tokens"),
    _histogram("request_generation_tokens", "Tokens generated.", "generated_tokens"),
    _histogram("request_max_num_generation_tokens", "The longest sample.", "longest_sample_tokens"),
    _histogram("request_params_n", "Samples asked for.", "request_samples"),
    _histogram("request_params_max_tokens", "max_tokens asked for.", "request_max_tokens"),
    _histogram("kv_block_lifetime_seconds", "Allocation to eviction.", "block_lifetime_seconds"),
    _histogram("kv_block_idle_before_evict_seconds", "Idle before eviction.", "block_idle_seconds"),
    _histogram("kv_block_reuse_gap_seconds", "Idle before reuse.", "block_reuse_gap_seconds"),
    # Names that vLLM has removed, which its older dashboards still query.
    _gauge("num_requests_swapped", "0: preempted sequences wait without blocks.", lambda s: 0),
    _gauge("gpu_cache_usage_perc", "As kv_cache_usage_perc.", lambda s: s.kv.utilization),
    _gauge("cpu_cache_usage_perc", "Used blocks of the host tier / its capacity.", _host_usage),
    _histogram("time_per_output_token_seconds", "As inter_token_latency_seconds.", "inter_token_latency_seconds"),
)  # fmt: skip


def vllm_families(stats: EngineStats) -> Iterator[Family]:
    """Yield the snapshot's families under vLLM's names."""
    return (alias.family(stats) for alias in ALIASES)
