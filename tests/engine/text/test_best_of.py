"""best_of: more samples are drawn than returned, and the most likely ones are reported at the end."""

from __future__ import annotations

import pytest

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import CompletionDelta, SampleState
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.best_of import BestOf
from tests.engine.tiny_model import save_tiny_llama

PROMPT = [5, 9, 11, 30, 2]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_llama(directory, std=0.3)
    return LLM(str(directory), num_kv_blocks=200, block_size=4, num_threads=1, max_num_seqs=16)


def drawn(n: int, best_of: int | None, **params: object) -> SamplingParams:
    settings: dict[str, object] = {"max_tokens": 9, "seed": 3, "temperature": 1.0}
    return SamplingParams(n=n, best_of=best_of, **(settings | params))  # type: ignore[arg-type]


def test_the_likeliest_of_all_samples_are_returned_best_first(llm: LLM) -> None:
    (everything,) = llm.generate([PROMPT], drawn(7, None, logprobs=0), use_tqdm=False)
    totals = {
        tuple(output.token_ids): sum(entry.logprob or 0.0 for entry in output.logprobs or ())
        for output in everything.outputs
    }
    assert len(totals) == 7
    ranked = sorted(totals, key=lambda tokens: -totals[tokens])
    (best,) = llm.generate([PROMPT], drawn(3, 7), use_tqdm=False)
    assert [tuple(output.token_ids) for output in best.outputs] == ranked[:3]
    assert [output.index for output in best.outputs] == [0, 1, 2]
    for output in best.outputs:
        assert output.cumulative_logprob == pytest.approx(totals[tuple(output.token_ids)], abs=1e-4)
        assert output.logprobs is None, "nobody asked for them"
    assert best.usage.completion_tokens == sum(len(output.token_ids) for output in best.outputs)
    llm.engine.check_integrity()


def test_logprobs_are_told_to_those_who_ask(llm: LLM) -> None:
    (best,) = llm.generate([PROMPT], drawn(2, 4, logprobs=2), use_tqdm=False)
    for output in best.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)


def test_nothing_is_told_before_the_last_sample_has_ended(llm: LLM) -> None:
    engine = llm.engine
    token_ids, params = engine.input_processor.process(prompt_token_ids=PROMPT, params=drawn(2, 5))
    engine.add_request("r", token_ids, params)
    news = []
    while engine.has_unfinished():
        news += engine.step()
    assert [bool(output.deltas) for output in news] == [False] * (len(news) - 1) + [True]
    assert [(delta.index, delta.offset) for delta in news[-1].deltas] == [(0, 0), (1, 0)]
    assert news[-1].finished


def test_as_many_as_n_is_n(llm: LLM) -> None:
    plain, best = (
        llm.generate([PROMPT], drawn(3, best_of), use_tqdm=False)[0].outputs for best_of in (None, 3)
    )
    assert [output.token_ids for output in plain] == [output.token_ids for output in best]


def test_an_aborted_request_ends_with_what_there_is(llm: LLM) -> None:
    engine = llm.engine
    token_ids, params = engine.input_processor.process(prompt_token_ids=PROMPT, params=drawn(2, 5))
    engine.add_request("r", token_ids, params)
    for _ in range(3):
        engine.step()
    (output,) = engine.abort("r")
    assert [delta.finish_reason for delta in output.deltas] == ["abort", "abort"]
    assert engine.stats().kv.active_blocks == 0


@pytest.mark.parametrize("params", [drawn(1, 3), SamplingParams(beam_width=2)], ids=["best_of", "beams"])
def test_there_is_nothing_to_resume(llm: LLM, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequest, match="resume"):
        llm.engine.add_request("r", PROMPT, params, resume=[SampleState(0, [1])])


def test_samples_are_joined_and_ties_keep_their_order() -> None:
    best_of = BestOf(2, with_logprobs=False)
    for index, logprob in ((2, -1.0), (1, -0.5), (0, -2.0), (1, -0.5), (2, None)):
        best_of.hold(
            CompletionDelta(
                index, [index], "ab"[index % 2], offset=4, logprobs=[TokenLogprobs(index, logprob)]
            )
        )
    best, second = best_of.release()
    assert (best.index, best.token_ids, best.text, best.cumulative_logprob) == (0, [1, 1], "bb", -1.0)
    assert (second.index, second.token_ids, second.text, second.offset) == (1, [2, 2], "aa", 0)
