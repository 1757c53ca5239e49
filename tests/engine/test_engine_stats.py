"""The engine's statistics compared with its work."""

from __future__ import annotations

import pytest

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.outputs import EngineStats, HistogramSnapshot
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.kv.block_pool import BlockPool
from pagemill.engine.scheduling.kv.residency import SAMPLE, BlockResidency

PROMPT = [40 + i % 50 for i in range(64)]


def run(engine: Engine, *requests: tuple[list[int], SamplingParams]) -> EngineStats:
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(f"r{number}", prompt, params)
    while engine.has_unfinished():
        engine.step()
    return engine.stats()


def echo(**options: object) -> Engine:
    return Engine.from_config(EngineConfig(model="echo", **options))  # type: ignore[arg-type]


def count(histogram: HistogramSnapshot) -> int:
    return sum(histogram.counts)


def test_each_request_is_observed_once() -> None:
    params = SamplingParams(max_tokens=5)
    stats = run(echo(), *(([90 + i, *PROMPT], params) for i in range(4)))
    for name in (
        "time_to_first_token_seconds", "time_per_output_token_seconds", "request_seconds", "request_wait_seconds",
        "request_prefill_seconds", "request_decode_seconds", "request_inference_seconds", "prompt_tokens",
        "generated_tokens", "request_samples", "request_max_tokens", "request_peak_blocks",
    ):  # fmt: skip
        assert count(stats.histograms[name][()]) == 4, name
    assert stats.histograms["request_max_tokens"][()].total == 4 * 5
    assert stats.histograms["request_peak_blocks"][()].total == 4 * 5, "65 + 4 tokens in blocks of 16"


def test_phases_add_up() -> None:
    stats = run(echo(), (PROMPT, SamplingParams(max_tokens=20)))
    seconds = {
        name: stats.histograms[f"request_{name}_seconds"][()].total
        for name in ("wait", "prefill", "decode", "inference")
    }
    assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"], abs=1e-9)
    assert stats.histograms["request_seconds"][()].total >= seconds["wait"] + seconds["inference"] - 1e-9
    per_token = stats.histograms["time_per_output_token_seconds"][()].total
    assert per_token == pytest.approx(seconds["decode"] / 19)


def test_prompt_tokens_come_from_somewhere() -> None:
    engine = echo()
    run(engine, (PROMPT, SamplingParams(max_tokens=2)))
    stats = run(engine, ([*PROMPT[:32], 7, 8, 9], SamplingParams(max_tokens=2)))
    assert stats.requests.prompt_tokens_by_source == {"computed": 64 + 3, "prefix_cache": 32}
    assert sum(stats.requests.prompt_tokens_by_source.values()) == stats.requests.prompt_tokens


def test_an_abort_before_the_first_step_counts_no_source() -> None:
    engine = echo()
    engine.add_request("gone", PROMPT, SamplingParams(max_tokens=2))
    engine.abort("gone")
    stats = engine.stats()
    assert sum(stats.requests.prompt_tokens_by_source.values()) == 0
    assert count(stats.histograms["request_wait_seconds"][()]) == 0
    assert stats.requests.finished["abort"] == 1


def test_steps_are_told_by_phase_and_kind_and_use_of_the_budget() -> None:
    stats = run(echo(max_num_batched_tokens=32), (PROMPT, SamplingParams(max_tokens=4)))
    kinds = {labels[0]: count(child) for labels, child in stats.histograms["step_tokens"].items()}
    assert kinds == {"prefill": 2, "decode": 3, "mixed": 0}
    for phase in ("schedule", "prepare", "forward", "sample", "output"):
        children = {
            kind: count(child) for (p, kind), child in stats.histograms["step_seconds"].items() if p == phase
        }
        assert children == kinds
    use = stats.histograms["step_budget_use"][()]
    assert use.total == pytest.approx(2 * 1.0 + 3 / 32)
    assert stats.steps.busy_seconds > 0


def test_who_waits_says_for_what() -> None:
    def waiting(**options: object) -> str:
        engine = echo(**options)
        for number in range(3):
            engine.add_request(f"r{number}", [50 + number, *PROMPT], SamplingParams(max_tokens=40))
        engine.step()
        assert engine.stats().scheduler.waiting
        return engine.stats().scheduler.waiting_for

    assert waiting(max_num_seqs=1) == "rows"
    assert waiting(num_kv_blocks=9) == "kv"
    assert waiting(max_num_batched_tokens=16) == "budget"


def test_a_blocks_life_is_timed_from_allocation_to_eviction() -> None:
    pool = BlockPool(SAMPLE + 3)
    everything = pool.allocate(pool.num_available)
    (timed,) = [
        block for block in everything if BlockResidency.is_sampled(block.block_id) and block.block_id == 1
    ]
    pool.fill(timed, 16)
    assert pool.register(timed, b"hash")
    pool.release(everything, -1)

    def counts() -> dict[str, int]:
        return {name: count(child[()]) for name, child in pool.residency.histograms().items()}

    unhashed = sum(BlockResidency.is_sampled(block.block_id) for block in everything) - 1
    assert counts() == {
        "block_lifetime_seconds": unhashed, "block_idle_seconds": 0, "block_reuse_gap_seconds": 0,
    }  # fmt: skip
    pool.acquire(timed)
    assert counts()["block_reuse_gap_seconds"] == 1
    pool.release([timed], -1)
    pool.allocate(pool.num_available)
    assert counts() == {
        "block_lifetime_seconds": unhashed + 1, "block_idle_seconds": 1, "block_reuse_gap_seconds": 1,
    }  # fmt: skip


def test_a_forgotten_block_ends_its_life_once() -> None:
    residency = BlockResidency()
    residency.allocated(1)
    residency.released(1, is_cached=True)
    residency.forgotten(1)
    residency.forgotten(1)
    residency.allocated(1)
    counted = {name: count(child[()]) for name, child in residency.histograms().items()}
    assert counted == {
        "block_lifetime_seconds": 1, "block_idle_seconds": 0, "block_reuse_gap_seconds": 0,
    }  # fmt: skip
