"""Every request is rejected, fails as `output_invalid`, or gets tokens that it allows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.execution.sampling.logprobs import TopLogprobs
from pagemill.engine.execution.sampling.narrow_head import NarrowVocabulary
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.sampling.sampler import Sampler
from pagemill.engine.llm import LLM
from pagemill.engine.plan import NewRow, Sample, TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.jobs.logprob_columns import prompt_logprobs_json
from tests.engine.execution.sampling.extreme_cases import CASES, Case, check
from tests.engine.scheduling.harness import Harness, make_config, make_request, result, schedule
from tests.engine.tiny_model import EOS, VOCAB_SIZE, save_tiny_llama

_EXTREMES = [5e-324, 1e-40, 1e-9, 1e-3, 0.0, 1.0, 1e3, 1e6, 3.4e38, 3.5e38, 1e308, -1e6, -1e308]
PROMPT = [10, 11, 12, 10, 11]


@settings(max_examples=200)
def assert_finite(entries: Iterable[TokenLogprobs | None]) -> None:
    """JSON does not have other numbers."""
    for entry in filter(None, entries):
        assert entry.logprob is None or math.isfinite(entry.logprob)
        assert all(math.isfinite(value) for _, value in entry.top)


@pytest.mark.slow
@given(st.lists(CASES, min_size=1, max_size=4))
def test_samples_are_allowed_or_told_to_be_none(cases: list[Case]) -> None:
    check(cases)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(CASES, min_size=1, max_size=4))
def test_so_are_those_that_a_device_draws(cases: list[Case]) -> None:
    check(cases, draws_on_device=True)


def test_a_narrow_vocabulary_without_a_possible_token_is_told() -> None:
    """One sample's tokens are impossible for the model; another's in the same step are not."""
    params = SamplingParams(temperature=0.0)
    work = [SampleWork(Sample(n, n, 1), NewRow(n, "r", 0, [0], 1, [1], params, 1)) for n in range(3)]
    barred = torch.tensor([[False, True], [True, False], [True, False]])
    logits = torch.tensor([[-math.inf, 1.0], [-math.inf, 1.0], [-math.inf, math.nan]])
    output = Sampler(()).sample_narrow(logits, work, NarrowVocabulary((4, 7), barred))
    assert output.has_choice.tolist()[:2] == [False, True]
    assert output.is_valid.tolist() == [True, True, False]
    assert int(output.token_ids[1]) == 7


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_llama(directory)
    return LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=128, max_num_seqs=8, num_threads=1)


_FIELDS = st.fixed_dictionaries(
    {"n": st.integers(1, 2), "max_tokens": st.integers(1, 4), "logprobs": st.sampled_from([None, 0, 20])},
    optional={
        "temperature": st.sampled_from(_EXTREMES),
        "repetition_penalty": st.sampled_from(_EXTREMES),
        "top_p": st.sampled_from(_EXTREMES),
        "min_p": st.sampled_from(_EXTREMES),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from(_EXTREMES), max_size=3),
        "allowed_token_ids": st.lists(st.sampled_from([*EOS, 20, 21]), min_size=1, max_size=3).map(tuple),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.sampled_from([(), (20,), (20, 21)]),
        "best_of": st.just(3),
        "beam_width": st.just(3),
        "length_penalty": st.sampled_from([1.0, *_EXTREMES]),
        "prompt_logprobs": st.sampled_from([None, 0, 20]),
    },
)


@settings(max_examples=80)
@given(_FIELDS)
def test_a_request_is_refused_or_fails_or_gets_what_it_allows(llm: LLM, fields: dict[str, Any]) -> None:
    try:
        (generated,) = llm.generate([PROMPT], SamplingParams(**fields), use_tqdm=False)
    except InvalidRequest:
        return
    if generated.error_code is not None:
        assert generated.error_code == "output_invalid"
        return
    allowed = set(fields.get("allowed_token_ids", range(VOCAB_SIZE)))
    for output in generated.outputs:
        assert set(output.token_ids) <= allowed
        assert_finite(output.logprobs or ())
    assert_finite(generated.prompt_logprobs or ())


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_structure_that_is_barred_throughout_fails_alone(overlapped: bool) -> None:
    llm = LLM("smollm2", num_kv_blocks=64, num_threads=1, async_scheduling=overlapped)
    labels = StructuredOutputs(choice=("yes", "no"))
    free = SamplingParams(max_tokens=4, temperature=0.0)
    both = ("yes", "no")
    barred = [
        SamplingParams(max_tokens=4, structured_outputs=labels, bad_words=both),
        SamplingParams(max_tokens=4, temperature=0.0, structured_outputs=labels, bad_words=both, logprobs=2),
        SamplingParams(max_tokens=4, n=2, best_of=3, structured_outputs=labels, allowed_token_ids=(5,)),
        SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="7"), allowed_token_ids=(5,)),
    ]
    results = llm.generate("The answer is", free, use_tqdm=False)
    results += llm.generate(["The answer is"] * 5, [free, *barred], use_tqdm=False)
    assert [r.error_code for r in results] == [None, None, *["output_invalid"] * 4]
    assert all("left no token to choose" in (r.error or "") for r in results[2:])
    assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
    stats = llm.engine.stats()
    assert stats.scheduler.invalid_logits == 0, "nothing is wrong with the model"
    llm.engine.check_integrity()


@pytest.mark.slow
def test_what_is_known_to_leave_nothing_is_refused_beforehand() -> None:
    llm = LLM("smollm2", num_kv_blocks=64, num_threads=1)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    (yes,) = tokenizer.encode("yes", add_special_tokens=False)
    eos = llm.engine.limits.eos_token_ids[0]
    for fields in (
        {"allowed_token_ids": (yes,), "bad_words": ("yes",)},
        {"allowed_token_ids": (yes, eos), "stop_token_ids": (yes,), "min_tokens": 1},
        {"allowed_token_ids": (yes, eos), "bad_words": ("yes",), "min_tokens": 1},
    ):
        with pytest.raises(InvalidRequest, match="bar every one of them"):
            llm.generate("a", SamplingParams(**fields), use_tqdm=False)  # type: ignore[arg-type]
    (generated,) = llm.generate(
        "a", SamplingParams(allowed_token_ids=(yes, eos), bad_words=("yes",)), use_tqdm=False
    )
    assert generated.outputs[0].token_ids == [eos]


def test_a_beam_search_that_finds_nothing_fails(llm: LLM) -> None:
    params = SamplingParams(
        n=2, beam_width=2, max_tokens=4, min_tokens=2, stop_token_ids=(20,), allowed_token_ids=(20, *EOS)
    )
    engine = llm.engine
    engine.add_request("beams", PROMPT, params)  # past the input processor, which would reject it
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    (end,) = [output for output in outputs if output.finished]
    assert end.error_code == "output_invalid"
    engine.check_integrity()


def test_a_log_probability_is_finite_in_json() -> None:
    logprobs = torch.tensor([[0.0, -math.inf, -math.inf]])
    found = TopLogprobs.from_logprobs(logprobs, torch.tensor([1]), [3])
    (entry,) = found.entries(iter(found.tensors()))
    (row,) = json.loads(prompt_logprobs_json([entry], [1], str))
    assert row["chosen"]["logprob"] == torch.finfo(torch.float32).min


def test_a_prompt_s_log_probability_that_is_no_number_fails_its_request_alone() -> None:
    harness = Harness(make_config())
    harness.add(make_request("bad", [1, 2, 3], prompt_logprobs=0))
    harness.add(make_request("good", [4, 5, 6], prompt_logprobs=0))
    plan = schedule(harness)
    step = result(plan, 7, 8)
    step.prompt_logprobs = {
        0: [TokenLogprobs(2, math.nan), TokenLogprobs(3, -1.0)],
        1: [TokenLogprobs(5, -1.0), TokenLogprobs(6, -1.0)],
    }
    updates = harness.scheduler.update(plan, step)
    ended = {u.sequence.request.request_id: u.error_code for u in updates if u.error is not None}
    assert ended == {"bad": "output_invalid"}
    harness.check()
