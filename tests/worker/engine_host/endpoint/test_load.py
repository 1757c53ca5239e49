"""The load of an endpoint, as each engine exports it."""

from __future__ import annotations

import pytest

from pagemill.worker.engine_host.endpoint.load import Load, read_metrics, read_slots

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="2000"} 1.0
vllm:prefix_cache_queries_total{engine="0"} 1e3
vllm:prefix_cache_hits_total{engine="0"} 250.0
"""
SGLANG = 'sglang:num_running_reqs{model_name="m"} 5.0\nsglang:num_queue_reqs 2.0\nsglang:token_usage 0.25\n'
TGI = "tgi_batch_current_size 6\ntgi_queue_size 1\n"


def test_each_engine_s_names() -> None:
    assert read_metrics(VLLM) == Load(
        running=7, waiting=1, kv_use=0.75, kv_blocks=2000, block_size=32, prefix_queried=1000, prefix_hit=250
    )
    assert read_metrics(SGLANG) == Load(running=5, waiting=2, kv_use=0.25)
    assert read_metrics(TGI) == Load(running=6, waiting=1)
    slots = b'[{"id": 0, "is_processing": true}, {"id": 1, "is_processing": false}]'
    assert read_slots(slots) == Load(running=1, waiting=0, rows=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_running{",
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc +Inf",
        "vllm:num_requests_running abc",
        'vllm:cache_config_info{block_size="x",num_gpu_blocks="-5"} 1',
        "\x00\xff" * 100,
    ],
)
def test_what_means_nothing_is_unknown(text: str) -> None:
    assert read_metrics(text) == Load()


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"7", b"[" * 100_000])
def test_slots_that_mean_nothing_are_unknown(body: bytes) -> None:
    assert read_slots(body) == Load()


def test_only_what_is_known_is_a_metric() -> None:
    assert Load().kv_stats()[1] == frozenset()
    stats, known = read_metrics(VLLM).kv_stats()
    assert stats.utilization == 0.75
    assert stats.capacity_blocks == 2000
    assert "kv_cache_capacity_blocks" in known
    stats, known = read_metrics(SGLANG).kv_stats()
    assert (stats.utilization, known) == (0.25, {"kv_cache_utilization_ratio"})
