"""The host tier of the prefix cache: evicted blocks and those of preempted sequences return bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.host_cache import HostCache
from pagemill.engine.llm import LLM
from pagemill.engine.plan import StepPlan
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.kv.host_tier import HostTier
from pagemill.engine.scheduling.request import Request, SequenceStatus
from pagemill.kernels.types.layer_cache import allocate_layer
from tests.engine.scheduling.harness import PROMPT, Harness, expected, make_config, make_request
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama


def tiered(**changes: object) -> Harness:
    """A pool of 5 blocks of 4, which holds one document."""
    return Harness(make_config(**({"num_kv_blocks": 6, "num_host_blocks": 20} | changes)))


def collide(harness: Harness) -> tuple[Request, Request]:
    """For a pool of 6 blocks: the older request needs a fourth while the younger has partly filled its third."""
    old = harness.add(make_request("old", PROMPT, max_tokens=10))
    return old, harness.add(make_request("young", [50, *PROMPT[2:]], arrival=1.0, max_tokens=10))


def run_until(harness: Harness, condition: Callable[[], object]) -> None:
    for _ in range(100):
        if condition():
            return
        harness.step()
    raise AssertionError("the condition was never met")


def documents(harness: Harness, *numbers: int) -> list[StepPlan]:
    """Run one request per document of 17 tokens, sequentially; returns their plans."""
    first = len(harness.plans)
    for number in numbers:
        prompt = range(100 * number, 100 * number + 17)
        request = harness.add(make_request(f"{number}-{len(harness.plans)}", prompt, max_tokens=1))
        harness.run()
        assert request.sequences[0].output_token_ids == expected(harness, request)[0]
    return harness.plans[first:]


class TestEvictedPrefixes:
    def test_they_return_from_the_host(self) -> None:
        harness = tiered()
        first = documents(harness, 1, 2)
        assert sum(plan.num_tokens for plan in first) == 34
        again = documents(harness, 1, 2, 1)
        assert [plan.num_tokens for plan in again] == [1, 1, 1]
        assert all(len(plan.host_loads) == 4 for plan in again)
        kv = harness.scheduler.kv_cache.stats()
        assert (kv.host_hit_tokens, kv.prefix_hit_tokens, kv.host_loaded_blocks) == (48, 48, 12)
        assert kv.host_stored_blocks == kv.host_used_blocks == 8, "each document is stored once"
        assert (kv.host_evictions, kv.host_skipped_blocks) == (0, 0)

    def test_without_a_tier_they_are_computed_again(self) -> None:
        harness = tiered(num_host_blocks=0)
        assert [plan.num_tokens for plan in documents(harness, 1, 2, 1)] == [17, 17, 17]

    def test_the_least_recently_used_leave_the_host(self) -> None:
        harness = tiered(num_host_blocks=8)
        documents(harness, 1, 2, 1, 3, 4)  # 1, which was used again, outlives 2
        assert harness.scheduler.kv_cache.stats().host_evictions > 0
        assert [plan.num_tokens for plan in documents(harness, 1)] == [1]
        assert [plan.num_tokens for plan in documents(harness, 2)] == [17]

    def test_the_copies_of_a_step_are_bounded(self) -> None:
        harness = tiered(max_host_copies=1)
        plans = documents(harness, 1, 2, 3)
        assert max(len(plan.host_stores) for plan in plans) == 1
        assert harness.scheduler.kv_cache.stats().host_skipped_blocks > 0

    def test_a_second_request_that_would_load_too_much_waits_for_the_next_step(self) -> None:
        harness = tiered(num_kv_blocks=20, max_host_copies=4)
        documents(harness, 1, 2, 3, 4, 5, 6, 7)
        requests = [make_request(f"r{n}", [*range(100 * n, 100 * n + 17)], max_tokens=9) for n in (1, 2)]
        for request in requests:
            harness.add(request)
        harness.run()
        loads = [len(plan.host_loads) for plan in harness.plans if plan.host_loads]
        assert loads[-2:] == [4, 4]

    def test_what_a_failed_step_was_to_store_is_not_found(self) -> None:
        for failing in range(1, 8):
            harness = tiered()
            harness.model.bad_steps = {failing}
            documents(harness, 1, 2, 1, 2)

    def test_suspect_contents_are_not_found_on_the_host(self) -> None:
        harness = tiered()
        documents(harness, 1, 2)
        harness.model.nan_tokens = frozenset({116})
        request = harness.add(make_request("bad", range(100, 118), max_tokens=1))
        harness.run()
        assert harness.errors == {"bad": "output_invalid"}
        harness.model.nan_tokens = frozenset()
        assert request.is_finished
        assert [plan.num_tokens for plan in documents(harness, 1)] == [17]


def test_a_block_that_is_discarded_between_two_plans_is_stored_before_it_is_loaded() -> None:
    """A victim that returns before the next plan: otherwise it would load the host block's former content."""
    tier = HostTier(2, 4)
    tier.store("own", 3)
    host = tier.lookup("own")
    assert host is not None
    tier.use([host])
    tier.load(host, 7)
    tier.discard("own")
    tier.check_integrity(set())
    assert tier.take_copies(1) == ([(3, host.host_id)], [(host.host_id, 7)])
    tier.check_integrity(set())


class TestPreemption:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_victim_resumes_where_it_was(self, depth: int) -> None:
        harness = tiered(num_kv_blocks=7, depth=depth)
        old, young = collide(harness)
        sequence = young.sequences[0]
        run_until(harness, lambda: sequence.kept_entries)
        assert (sequence.status, sequence.row, sequence.block_ids) == (SequenceStatus.WAITING, None, [])
        num_kept = sequence.num_kept_tokens
        stores = {device for device, _ in harness.plans[-1].host_stores}
        given = {block for work in harness.plans[-1].work for block in work.new_block_ids}
        assert depth or given & stores, "a block is copied and given away in one step"

        run_until(harness, lambda: sequence.row is not None)
        (new,) = harness.plans[-1].new_rows
        assert [work.start for work in harness.plans[-1].work if work.row == new.row] == [num_kept]
        assert not sequence.kept_entries
        harness.run()
        for request in (old, young):
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]
        stats = harness.scheduler.stats()
        assert stats.preemptions > 0
        assert (stats.recomputed_tokens, stats.preempted_tokens > 0) == (0, True)

    def test_without_a_tier_the_last_block_is_computed_again(self) -> None:
        harness = tiered(num_kv_blocks=7, num_host_blocks=0)
        requests = collide(harness)
        harness.run()
        assert 0 < harness.scheduler.stats().recomputed_tokens < 4
        for request in requests:
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]

    def test_an_aborted_victim_leaves_nothing_under_its_own_key(self) -> None:
        harness = tiered(num_kv_blocks=7)
        sequence = collide(harness)[1].sequences[0]
        run_until(harness, lambda: sequence.kept_entries)
        entries, host = sequence.kept_entries, harness.scheduler.kv_cache.host
        assert all(host.lookup((sequence, index)) for index in entries)
        harness.abort("young")
        assert not any(host.lookup((sequence, index)) for index in entries)
        harness.run()

    def test_what_a_failed_step_was_to_keep_is_computed_again(self) -> None:
        for depth in (0, 1):
            for failing in range(1, 14):
                harness = tiered(num_kv_blocks=7, depth=depth)
                harness.model.bad_steps = {failing}
                for request in collide(harness):
                    harness.run()
                    assert request.sequences[0].output_token_ids == expected(harness, request)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_blocks_come_back_bit_for_bit_with_their_scales(dtype: torch.dtype) -> None:
    layers = [allocate_layer(9, 2, 4, 8, dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        t.view(torch.uint8) if t.element_size() == 1 else t for layer in layers for t in layer.tensors()
    ]
    for tensor in tensors:
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in tensors]
    host = HostCache(layers, 6, CpuBackend())
    host.store([(1, 5), (7, 0), (3, 1), (8, 3)])  # host runs 0-1, 3, 5
    for tensor in tensors:
        tensor[[1, 7, 3]] = 0
    host.load([(1, 7), (0, 3), (5, 2), (3, 1)])
    for tensor, old in zip(tensors, before, strict=True):
        for now, then in ((7, 3), (3, 7), (2, 1), (1, 8), (8, 8), (4, 4)):
            assert torch.equal(tensor[now], old[then])


def test_invalid_sizes_are_rejected(tmp_path: Path) -> None:
    for size in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            EngineConfig(model="echo", host_cache_gib=size)
    save_tiny_llama(tmp_path)
    for options in ({"host_cache_gib": 1e-9}, {"host_cache_gib": 1e3}, {"enable_prefix_caching": False}):
        with pytest.raises(ConfigError, match="host_cache_gib"):
            LLM(str(tmp_path), **{"num_kv_blocks": 20, "host_cache_gib": 0.01} | options)


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["depth 0", "depth 1"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_bits_are_those_of_an_engine_that_never_evicts(
    tmp_path: Path, kv_cache_dtype: str, async_scheduling: bool
) -> None:
    save_tiny_llama(tmp_path)
    options: dict[str, Any] = {
        "block_size": 4,
        "max_num_seqs": 8,
        "num_threads": 1,
        "max_num_batched_tokens": 32,
        "batch_invariant": kv_cache_dtype == "auto",
        "kv_cache_dtype": kv_cache_dtype,
        "async_scheduling": async_scheduling,
    }
    prompts = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (3, 9, 17, 4, 24, 11)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, n=n, seed=7, logprobs=1)
        for t, n in ((0.0, 1), (0.9, 2), (0.0, 1), (0.8, 3), (0.0, 1), (1.0, 1))
    ]

    def run(llm: LLM) -> list[Any]:
        results = llm.generate(prompts, params, use_tqdm=False)
        assert all(result.error is None for result in results)
        bits = options["batch_invariant"]
        return [
            [(output.token_ids, output.logprobs if bits else None) for output in result.outputs]
            for result in results
        ]

    expected = run(LLM(str(tmp_path), num_kv_blocks=400, **options))
    tight = LLM(str(tmp_path), num_kv_blocks=45, host_cache_gib=0.01, **options)
    for _ in range(2):
        assert run(tight) == expected
    stats = tight.engine.stats()
    assert stats.scheduler.preemptions > 0
    assert stats.kv.host_loaded_blocks > 0
    assert stats.kv.host_used_blocks > 0
    tight.engine.check_integrity()
