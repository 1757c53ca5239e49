"""Preemption by swapping: whole tables to the host and back, and when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.host_cache import HostCache, measure_link
from pagemill.engine.llm import LLM
from pagemill.engine.plan import RowWork, StepPlan
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.blocks import HostBlock
from pagemill.engine.scheduling.kv.swap_space import SwapQuote
from pagemill.engine.scheduling.preemption_cost import PreemptionCost
from pagemill.engine.scheduling.request import Sequence, SequenceStatus
from pagemill.kernels.types.layer_cache import allocate_layer
from tests.engine.scheduling.harness import PROMPT, Harness, expected, make_config, make_request
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama


def always(quote: SwapQuote, victims: Any) -> bool:
    return True


def swapping(**changes: object) -> Harness:
    """A pool of 6 blocks of 4 in which two requests of 7 + 10 tokens collide."""
    settings = {"num_kv_blocks": 7, "enable_prefix_caching": False, "num_host_blocks": 8}
    harness = Harness(make_config(**(settings | changes)))
    harness.scheduler.preemption.cost.prefers_swap = always  # type: ignore[method-assign]
    return harness


def run_until(harness: Harness, condition: Callable[[], object]) -> None:
    for _ in range(100):
        if condition():
            return
        harness.step()
    raise AssertionError("it never came to that")


class TestScheduling:
    def test_a_victim_waits_with_its_blocks_on_the_host_and_goes_on_where_it_was(self) -> None:
        harness = swapping()
        old = harness.add(make_request("old", PROMPT, max_tokens=10))
        young = harness.add(make_request("young", PROMPT, arrival=1.0, max_tokens=10)).sequences[0]
        run_until(harness, lambda: young.swapped_blocks)
        plan = harness.plans[-1]
        assert (young.status, young.row, young.block_ids) == (SequenceStatus.WAITING, None, [])
        num_computed = young.num_computed_tokens
        assert num_computed == young.num_known_tokens - 1
        assert len(young.swapped_blocks) == len(plan.swap_out) == -(-num_computed // 4)
        # A block that is copied out is given to the older request in the same step.
        given = {block for work in plan.work for block in work.new_block_ids}
        assert given & {device for device, _ in plan.swap_out}
        stats = harness.scheduler.stats()
        assert (stats.swapped, stats.swap_preemptions, stats.preemptions) == (1, 1, 0)
        assert harness.scheduler.kv_cache.stats().host_used_blocks == len(plan.swap_out)

        run_until(harness, lambda: not young.swapped_blocks)
        plan = harness.plans[-1]
        assert len(plan.swap_in) == -(-num_computed // 4)
        (new,) = plan.new_rows
        assert (
            new.block_ids[: len(plan.swap_in)] == sorted(new.block_ids[: len(plan.swap_in)]) or new.block_ids
        )
        assert [work.start for work in plan.work if work.row == new.row] == [num_computed]
        harness.run()
        for request in (old, young.request):
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]
        stats = harness.scheduler.stats()
        assert (stats.recomputed_tokens, stats.preempted_tokens) == (0, 0)
        kv = harness.scheduler.kv_cache.stats()
        assert kv.swapped_out_blocks == kv.swapped_in_blocks > 0

    def test_a_swapped_request_keeps_its_place(self) -> None:
        harness = swapping(max_num_seqs=2)
        for name, arrival in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
            harness.add(make_request(name, PROMPT, arrival=arrival, max_tokens=14))
        harness.run()
        entered = [new.request_id for plan in harness.plans for new in plan.new_rows]
        assert harness.scheduler.stats().swap_preemptions > 0
        assert entered.index("c") > max(i for i, name in enumerate(entered) if name == "b")

    def test_shared_blocks_stay_and_are_held(self) -> None:
        harness = swapping(num_kv_blocks=10)
        harness.add(make_request("old", PROMPT, arrival=-1.0, max_tokens=10))
        pair = harness.add(make_request("pair", range(8), n=2, temperature=1.0, max_tokens=12))
        run_until(harness, lambda: pair.sequences[1].swapped_blocks)
        first, second = pair.sequences
        kinds = [isinstance(entry, HostBlock) for entry in second.swapped_blocks]
        assert kinds == [False, False] + [True] * (
            len(kinds) - 2
        )  # two prompt blocks are the sibling's as well
        pool = harness.scheduler.kv_cache.pool
        assert [pool.blocks[block_id].ref_count for block_id in first.block_ids[:2]] == [2, 2]
        harness.run()
        assert [s.output_token_ids for s in pair.sequences] == [expected(harness, pair, i)[0] for i in (0, 1)]

    def test_blocks_that_the_prefix_cache_still_holds_are_not_copied_back(self) -> None:
        harness = swapping(enable_prefix_caching=True)
        harness.add(make_request("old", PROMPT, max_tokens=10))
        young = harness.add(make_request("young", [*PROMPT[:-1], 50], arrival=1.0, max_tokens=10))
        harness.run()
        kv = harness.scheduler.kv_cache.stats()
        assert harness.scheduler.stats().swap_preemptions > 0
        assert kv.swapped_in_blocks < kv.swapped_out_blocks
        assert young.sequences[0].output_token_ids == expected(harness, young)[0]

    def test_a_full_host_pool_means_computing_again(self) -> None:
        harness = swapping(num_host_blocks=1)
        requests = [harness.add(make_request(name, PROMPT, max_tokens=10)) for name in "ab"]
        harness.run()
        stats = harness.scheduler.stats()
        assert stats.swap_preemptions == 0
        assert stats.preemptions > 0
        assert stats.recomputed_tokens == stats.preempted_tokens > 0
        for request in requests:
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]

    def test_an_aborted_swapped_request_leaves_nothing_on_the_host(self) -> None:
        harness = swapping()
        harness.add(make_request("old", PROMPT, max_tokens=10))
        young = harness.add(make_request("young", PROMPT, arrival=1.0, max_tokens=10)).sequences[0]
        run_until(harness, lambda: young.swapped_blocks)
        harness.abort("young")
        assert harness.scheduler.kv_cache.stats().host_used_blocks == 0
        harness.run()

    def test_what_a_failed_step_was_to_copy_out_is_computed_again(self) -> None:
        for failing in range(1, 14):
            harness = swapping()
            harness.model.bad_steps = {failing}
            requests = [harness.add(make_request(name, PROMPT, max_tokens=10)) for name in "ab"]
            harness.run()
            for request in requests:
                assert request.sequences[0].output_token_ids == expected(harness, request)[0]

    def test_beams_go_together_and_come_back_together(self) -> None:
        harness = swapping(num_kv_blocks=14, num_host_blocks=20)
        harness.add(make_request("old", range(24), max_tokens=18))
        search = harness.add(make_request("s", [4, 5, 6], arrival=1.0, beam_width=3, max_tokens=12, n=3))
        run_until(harness, lambda: harness.scheduler.stats().swapped)
        assert all(beam.swapped_blocks and beam.output_token_ids for beam in search.sequences)
        shared = [
            entry.ref_count for entry in search.sequences[0].swapped_blocks if isinstance(entry, HostBlock)
        ]
        assert max(shared) > 1, "what the beams shared is on the host once"
        run_until(harness, lambda: not harness.scheduler.stats().swapped)
        assert len(harness.plans[-1].new_rows) == 3
        harness.run()
        assert harness.scheduler.stats().preemptions == 0


class TestCost:
    @staticmethod
    def plan(num_rows: int, tokens_each: int) -> StepPlan:
        return StepPlan(0, work=[RowWork(row, 0, tokens_each) for row in range(num_rows)])

    def victims(self, **params: object) -> list[Sequence]:
        return make_request("r", PROMPT, **params).sequences

    def test_bytes_over_bandwidth_beside_tokens_times_their_time(self) -> None:
        cost = PreemptionCost(block_bytes=1000, bytes_per_second=1e6)  # 2 ms for a block, there and back
        cost.observe(self.plan(1, 100), seconds=0.1)  # 1 ms a token
        assert cost.prefers_swap(SwapQuote(4, 16), self.victims())
        assert cost.prefers_swap(SwapQuote(4, 8), self.victims())
        assert not cost.prefers_swap(SwapQuote(4, 7), self.victims())

    def test_before_anything_was_measured_nothing_is_copied(self) -> None:
        cost = PreemptionCost(block_bytes=1000, bytes_per_second=1e6)
        assert not cost.prefers_swap(SwapQuote(1, 16), self.victims())

    def test_decode_steps_say_nothing_about_a_prompt_but_something_about_beams(self) -> None:
        cost = PreemptionCost(block_bytes=1000, bytes_per_second=1e6)
        cost.observe(self.plan(4, 1), seconds=0.01)
        assert not cost.prefers_swap(SwapQuote(1, 16), self.victims())
        request = Harness(make_config()).add(make_request("s", PROMPT, beam_width=2))
        request.sequences[0].output_token_ids = [1, 2, 3]
        assert cost.prefers_swap(SwapQuote(15, 16), request.sequences)
        assert not cost.prefers_swap(SwapQuote(16, 16), request.sequences)

    def test_steps_are_measured_while_there_is_swap_space(self) -> None:
        harness = Harness(make_config(num_host_blocks=4, kv_block_bytes=1, swap_bytes_per_second=1e18))
        harness.add(make_request("a", PROMPT))
        harness.run()
        assert harness.scheduler.preemption.cost.prefers_swap(SwapQuote(1, 4), self.victims())


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
    host.swap_out([(1, 5), (7, 0), (3, 1), (8, 3)])  # host runs 0-1, 3, 5
    for tensor in tensors:
        tensor[[1, 7, 3]] = 0
    host.swap_in([(1, 7), (0, 3), (5, 2), (3, 1)])
    for tensor, old in zip(tensors, before, strict=True):
        for now, then in ((7, 3), (3, 7), (2, 1), (1, 8), (8, 8), (4, 4)):
            assert torch.equal(tensor[now], old[then])


def test_the_link_is_measured() -> None:
    assert measure_link(CpuBackend()) > 1e6


def test_swap_space_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for size in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            EngineConfig(model="echo", swap_space_gib=size)
    save_tiny_llama(tmp_path)
    for size in (1e-9, 1e6):
        with pytest.raises(ConfigError, match="swap_space_gib"):
            LLM(str(tmp_path), num_kv_blocks=20, swap_space_gib=size)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["depth 0", "depth 1"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no cache", "cache"])
def test_output_is_that_of_an_engine_that_never_preempts(
    tmp_path: Path, prefix_caching: bool, async_scheduling: bool
) -> None:
    save_tiny_llama(tmp_path)
    options: dict[str, Any] = {
        "block_size": 4,
        "max_num_seqs": 8,
        "num_threads": 1,
        "max_num_batched_tokens": 32,
    }
    prompts = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (3, 9, 17, 4, 24, 11)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, n=n, seed=7, logprobs=1)
        for t, n in ((0.0, 1), (0.9, 2), (0.0, 1), (0.8, 3), (0.0, 1), (1.0, 1))
    ]

    def run(llm: LLM) -> list[list[list[int]]]:
        results = llm.generate(prompts, params, use_tqdm=False)
        assert all(result.error is None for result in results)
        return [[output.token_ids for output in result.outputs] for result in results]

    expected = run(LLM(str(tmp_path), num_kv_blocks=400, **options))
    tight = LLM(
        str(tmp_path),
        num_kv_blocks=45,
        swap_space_gib=0.01,
        enable_prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        **options,
    )
    tight.engine._scheduler.preemption.cost.prefers_swap = always  # type: ignore[method-assign]
    assert run(tight) == expected
    stats = tight.engine.stats()
    assert stats.scheduler.swap_preemptions > 0
    assert stats.kv.swapped_in_blocks > 0
    assert stats.kv.host_capacity_blocks > 0
    assert stats.kv.host_used_blocks == 0
    tight.engine.check_integrity()
