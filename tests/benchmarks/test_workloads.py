from __future__ import annotations

import statistics

import pytest

from benchmarks.workloads import LOWEST_TOKEN_ID, MIXED_INPUT, MIXED_OUTPUT, WORKLOADS, Workload, label, mixed

VOCAB_SIZE = 49152


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_seed_fixes_every_token(name: str) -> None:
    build = WORKLOADS[name]
    assert build(VOCAB_SIZE, 0, 1.0) == build(VOCAB_SIZE, 0, 1.0)
    assert build(VOCAB_SIZE, 0, 1.0).prompts != build(VOCAB_SIZE, 1, 1.0).prompts


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_prompts_stay_clear_of_special_tokens(name: str) -> None:
    tokens = [token for prompt in WORKLOADS[name](VOCAB_SIZE, 0, 1.0).prompts for token in prompt]
    assert min(tokens) >= LOWEST_TOKEN_ID
    assert max(tokens) < VOCAB_SIZE


def test_shapes_are_the_published_ones() -> None:
    shapes = {
        name: (len(workload.prompts), workload.num_prompt_tokens, workload.num_output_tokens)
        for name, workload in ((name, build(VOCAB_SIZE, 0, 1.0)) for name, build in WORKLOADS.items())
    }
    assert shapes["chat"] == (32, 32 * 64, 32 * 128)
    assert shapes["label"][0] == 128
    assert shapes["label"][2] == 128 * 4
    assert shapes["mixed"][0] == 64


def test_mixed_lengths_are_lognormal_within_their_bounds() -> None:
    workloads = [mixed(VOCAB_SIZE, seed) for seed in range(20)]
    inputs = [len(prompt) for workload in workloads for prompt in workload.prompts]
    outputs = [count for workload in workloads for count in workload.max_tokens]
    for lengths, distribution in ((inputs, MIXED_INPUT), (outputs, MIXED_OUTPUT)):
        assert min(lengths) >= distribution.low
        assert max(lengths) == distribution.high  # 1280 draws reach the clip at two standard deviations
        assert statistics.median(lengths) == pytest.approx(distribution.median, rel=0.15)
        assert statistics.mean(lengths) > 1.3 * statistics.median(lengths)


def test_label_prompts_share_exactly_256_tokens() -> None:
    workload = label(VOCAB_SIZE, 0)
    first, *others = workload.prompts
    assert all(prompt[:256] == first[:256] for prompt in others)
    assert len({tuple(prompt[256:264]) for prompt in workload.prompts}) == len(workload.prompts)
    assert {len(prompt) for prompt in workload.prompts} <= set(range(256 + 32, 256 + 49))


def test_survives_json() -> None:
    workload = mixed(VOCAB_SIZE, 0, 0.1)
    assert Workload.from_json(workload.to_json()) == workload


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_renewed_requests_share_no_block_with_earlier_ones_and_keep_their_shape(name: str) -> None:
    original = WORKLOADS[name](VOCAB_SIZE, 0, 1.0)
    assert original.renewed(VOCAB_SIZE, 0) == original
    seen: set[tuple[int, ...]] = set()
    for times in range(20):
        renewed = original.renewed(VOCAB_SIZE, times)
        assert list(map(len, renewed.prompts)) == list(map(len, original.prompts))
        assert len({tuple(p[:256]) for p in renewed.prompts}) == len(
            {tuple(p[:256]) for p in original.prompts}
        )
        tokens = [token for prompt in renewed.prompts for token in prompt]
        assert min(tokens) >= LOWEST_TOKEN_ID
        assert max(tokens) < VOCAB_SIZE
        first_blocks = {tuple(prompt[:4]) for prompt in renewed.prompts}
        assert not first_blocks & seen
        seen |= first_blocks
