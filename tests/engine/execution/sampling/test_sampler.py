"""The sampler against exact probabilities, tiny explicit references, and itself in larger batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.execution.sampling.sampler import Sampler, SamplerOutput, SampleWork
from pagemill.engine.llm import LLM
from pagemill.engine.plan import NewRow, Sample, StepResult, TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import selection
from tests.engine.models.families.native_cases import write_llama
from tests.engine.models.families.tiny import VOCAB_SIZE

EOS = 3
# Not in order of size, so that a filter that forgets to map back is detected.
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, 1.0, -3.0, 1.9])


def make_work(
    params: SamplingParams,
    position: int = 0,
    *,
    row: int = 0,
    seed: int = 1,
    sample_index: int = 0,
    prompt: tuple[int, ...] = (0,),
    allowed: list[int] | None = None,
) -> SampleWork:
    new_row = NewRow(row, "r", sample_index, list(prompt), len(prompt), [1], params, seed)
    return SampleWork(Sample(row, row, len(prompt) + position, allowed), new_row)


def sample(
    logits: torch.Tensor, work: list[SampleWork], tokens: list[list[int]] | None = None
) -> SamplerOutput:
    table = torch.zeros(max(item.row.row for item in work) + 1, 16, dtype=torch.int64)
    for row, row_tokens in enumerate(tokens or []):
        table[row, : len(row_tokens)] = torch.tensor(row_tokens)
    return Sampler((EOS,)).sample(logits.clone(), work, table)


def logprobs_of(output: SamplerOutput) -> dict[int, list[TokenLogprobs]]:
    output.fill(result := StepResult(0, []), iter(output.tensors()))
    return result.logprobs


def greedy(logits: torch.Tensor, tokens: tuple[int, ...] = (0,), prompt: int = 1, **params: Any) -> int:
    work = make_work(SamplingParams(temperature=0.0, **params), len(tokens) - prompt, prompt=tokens[:prompt])
    return int(sample(logits[None], [work], [list(tokens)]).token_ids[0])


def exact_probabilities(params: SamplingParams) -> list[float]:
    """By the definitions, one token at a time, in double precision."""
    logits = LOGITS.double()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        logits[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = -torch.inf
    scaled = (logits / params.temperature).softmax(0).tolist()
    ordered = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    if params.top_p < 1.0:
        total, mass, kept = sum(scaled[token] for token in ordered), 0.0, []
        for token in ordered:
            kept.append(token)
            mass += scaled[token] / total
            if mass >= params.top_p:
                break
        ordered = kept
    ordered = [token for token in ordered if scaled[token] >= params.min_p * scaled[ordered[0]]]
    total = sum(scaled[token] for token in ordered)
    return [scaled[token] / total if token in ordered else 0.0 for token in range(len(scaled))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [
        {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_k": 1}, {"top_p": 0.6},
        {"top_p": 0.01}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.2}, {"top_p": 0.95, "min_p": 0.1},
        {"top_k": 3, "min_p": 0.2}, {"temperature": 0.7, "top_k": 5, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 3.0, "top_p": 0.99}, {"temperature": 0.8, "logit_bias": {6: 4.0, 1: -1.0}},
        {"allowed_token_ids": (0, 4, 6, 7), "top_p": 0.9, "temperature": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_exact_distribution(filters: dict[str, Any]) -> None:
    num_draws = 8192
    params = SamplingParams(**filters)
    expected = exact_probabilities(params)
    work = [make_work(params, position) for position in range(num_draws)]
    counts = Counter(sample(LOGITS.expand(num_draws, -1), work).token_ids.tolist())
    assert all(expected[token] > 0.0 for token in counts), "a filtered token was drawn"
    support = [token for token in range(len(expected)) if expected[token] > 0.0]
    statistic = sum(
        (counts[token] - num_draws * expected[token]) ** 2 / (num_draws * expected[token])
        for token in support
    )
    # The 99.99% points of chi-square with 0 to 7 degrees of freedom; the draws are the same in every run.
    limits = [1e-6, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88]
    assert statistic <= limits[len(support) - 1]


def test_samples_and_seeds_draw_independently() -> None:
    num_draws = 4096
    flat, params = torch.zeros(num_draws, 8), SamplingParams()
    streams = [
        [make_work(params, position, seed=seed, sample_index=index) for position in range(num_draws)]
        for seed, index in ((1, 0), (1, 1), (2, 0), (2**62 + 1, 0))
    ]
    drawn = [sample(flat, work).token_ids for work in streams]
    for first in range(4):
        for second in range(first):
            agreement = float((drawn[first] == drawn[second]).float().mean())
            assert abs(agreement - 1 / 8) < 0.03


def test_greedy_tie_goes_to_the_lowest_id() -> None:
    logits = torch.zeros(50_000)
    logits[[7, 40_000, 123, 49_999]] = 5.0
    assert greedy(logits) == 7
    assert greedy(logits, logit_bias={7: -1.0}) == 123


def test_tiny_temperature_is_greedy_and_finite() -> None:
    output = sample(LOGITS[None] * 1e4, [make_work(SamplingParams(temperature=1e-6))])
    assert output.token_ids.tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_row_is_flagged_and_touches_no_other(bad: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logprobs=2)
    work = [make_work(params, row=row, seed=row) for row in range(3)]
    clean = sample(LOGITS.repeat(3, 1), work)
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = bad
    output = sample(logits, work)
    clean_logprobs, logprobs = logprobs_of(clean), logprobs_of(output)
    assert output.is_valid.tolist() == [True, False, True]
    assert clean.is_valid.all()
    for row in (0, 2):
        assert output.token_ids[row] == clean.token_ids[row]
        assert logprobs[row] == clean_logprobs[row]
    assert 0 <= int(output.token_ids[1]) < LOGITS.numel(), "the token goes into the next step's embedding"


def test_row_of_minus_infinities_is_flagged() -> None:
    assert not sample(torch.full((1, 8), -torch.inf), [make_work(SamplingParams(temperature=0.0))]).is_valid


def test_logit_bias_is_added() -> None:
    assert greedy(LOGITS, logit_bias={6: 100.0}) == 6
    assert greedy(LOGITS, logit_bias={1: -0.2}) == 7
    assert greedy(LOGITS, logit_bias={1: -0.05}) == 1


def test_allowed_tokens_are_the_only_ones() -> None:
    assert greedy(LOGITS, allowed_token_ids=(6, 2)) == 2
    work = make_work(SamplingParams(temperature=0.0), allowed=[4, 5])
    assert sample(LOGITS[None], [work]).token_ids.tolist() == [5]
    both = make_work(SamplingParams(temperature=0.0, allowed_token_ids=(4, 7)), allowed=[4, 5])
    assert sample(LOGITS[None], [both]).token_ids.tolist() == [4]
    forced = make_work(SamplingParams(), allowed=[6])
    assert sample(LOGITS[None], [forced]).token_ids.tolist() == [6]


def test_stop_tokens_are_barred_before_min_tokens() -> None:
    logits = torch.zeros(8)
    logits[EOS], logits[5], logits[2] = 9.0, 8.0, 7.0
    assert greedy(logits, (0,), min_tokens=1) == 5
    assert greedy(logits, (0,), min_tokens=1, stop_token_ids=(5,)) == 2
    assert greedy(logits, (0, 1), min_tokens=1, stop_token_ids=(5,)) == EOS
    assert greedy(logits, (0,), ignore_eos=True) == EOS
    assert greedy(logits, (0,), ignore_eos=True, min_tokens=1) == 5, (
        "min_tokens bars EOS beside ignore_eos too"
    )


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.tensor([4.0, 3.0, 2.5, -1.0])
    assert greedy(logits, (0, 1), prompt=1, repetition_penalty=2.0) == 2
    assert greedy(logits, (3,), prompt=1, repetition_penalty=2.0) == 0
    negative = torch.tensor([-2.0, -3.0, -9.0, -9.0])
    assert greedy(negative, (0,), repetition_penalty=2.0) == 1, "a negative logit is multiplied, not divided"


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = torch.tensor([4.0, 3.0, 0.0, -1.0])
    assert greedy(logits, (0,), prompt=1, presence_penalty=2.0) == 0
    assert greedy(logits, (2, 0), prompt=1, presence_penalty=1.5) == 1
    assert greedy(logits, (2, 0, 0), prompt=1, presence_penalty=0.5) == 0
    assert greedy(logits, (2, 0), prompt=1, frequency_penalty=0.6) == 0
    assert greedy(logits, (2, 0, 0), prompt=1, frequency_penalty=0.6) == 1
    assert greedy(logits, (2, 1), prompt=1, frequency_penalty=-1.5) == 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={6: 100.0}, repetition_penalty=1.3)
    (entry,) = logprobs_of(sample(LOGITS[None], [make_work(params)], [[1]]))[0]
    expected = LOGITS.log_softmax(0)
    assert entry.token_id == 6
    assert entry.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    assert [token for token, _ in entry.top] == [1, 7, 3]
    assert [value for _, value in entry.top] == pytest.approx(expected[[1, 7, 3]].tolist(), abs=1e-6)


def test_logprobs_zero_gives_the_chosen_token_alone() -> None:
    output = sample(LOGITS.repeat(2, 1), [make_work(SamplingParams(temperature=0.0, logprobs=0)),
                                          make_work(SamplingParams(temperature=0.0))])  # fmt: skip
    logprobs = logprobs_of(output)
    assert set(logprobs) == {0}
    assert logprobs[0][0].top == []


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_a_draw_is_that_of_the_definition(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled operators return the same as the plain ones, without noise for all rows and without sorts."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 3000)
    filters = [
        {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 900, "top_p": 0.99, "min_p": 1e-4},
    ]  # fmt: skip
    work = [
        make_work(SamplingParams(temperature=temperature, **filters[row % 5]), row=row, seed=row)
        for row in range(40)
    ]
    fast = sample(logits, work).token_ids
    monkeypatch.setattr(selection, "has_compiled_face", lambda logits: False)
    assert torch.equal(sample(logits, work).token_ids, fast)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"))


def prompt_of(number: int) -> list[int]:
    return [(11 * number + 5 * i) % VOCAB_SIZE for i in range(3 + 4 * number)]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        n=1 + number % 2,
        seed=100 + number,
        max_tokens=12,
        temperature=1.0 + 0.2 * number,
        top_p=0.9,
        top_k=(0, 40)[number % 2],
        min_p=0.01 * number,
        repetition_penalty=1.1,
        frequency_penalty=0.1 * number,
        presence_penalty=(0.3, 0.0, -0.2)[number % 3],
        logit_bias={7: 2.0} if number == 4 else {},
        allowed_token_ids=tuple(range(60)) if number == 5 else None,
        logprobs=number % 3,
        ignore_eos=True,
    )


def run(checkpoint: Path, numbers: list[int], **options: Any) -> tuple[dict[int, list[list[int]]], LLM]:
    settings = {"num_kv_blocks": 128, "block_size": 4, "num_threads": 1, "max_model_len": 64} | options
    llm = LLM(str(checkpoint), **settings)
    results = llm.generate([prompt_of(n) for n in numbers], [params_of(n) for n in numbers], use_tqdm=False)
    outputs = [[output.token_ids for output in result.outputs] for result in results]
    return dict(zip(numbers, outputs, strict=True)), llm


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[int, list[list[int]]]:
    """Every request in a separate engine."""
    outputs = {number: run(checkpoint, [number])[0][number] for number in range(6)}
    assert outputs[1][0] != outputs[1][1], "samples of one request differ"
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 3, "async_scheduling": True},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 4, "pad_to_bucket": True},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [3, 5, 0, 4, 2, 1]], ids=["given", "shuffled"])
def test_seeded_output_is_the_same_in_any_crowd(
    checkpoint: Path, alone: dict[int, list[list[int]]], order: list[int], options: dict[str, Any]
) -> None:
    assert run(checkpoint, order, **options)[0] == alone


@pytest.mark.parametrize("overlapped", [False, True])
def test_seeded_output_survives_preemption(
    checkpoint: Path, alone: dict[int, list[list[int]]], overlapped: bool
) -> None:
    outputs, llm = run(checkpoint, list(range(6)), num_kv_blocks=18, async_scheduling=overlapped)
    assert llm.engine.stats().scheduler.preemptions > 0
    assert outputs == alone


def test_requests_without_a_seed_replay_with_the_engine(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def outputs(seed: int) -> list[list[int]]:
        llm = LLM(str(checkpoint), num_kv_blocks=64, num_threads=1, seed=seed)
        return [r.outputs[0].token_ids for r in llm.generate([[1, 2, 3]] * 3, params, use_tqdm=False)]

    first = outputs(0)
    assert outputs(0) == first
    assert outputs(1) != first
    assert len({tuple(output) for output in first}) == 3
