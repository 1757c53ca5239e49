"""Beam search: against transformers' on tiny fp32 models, and its rules one by one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.errors import NeverFits
from pagemill.engine.llm import LLM, GenerationOutput
from pagemill.engine.plan import StepPlan, StepResult
from pagemill.engine.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.scheduling.harness import Harness, make_config, make_request
from tests.engine.tiny_model import EOS, VOCAB_SIZE, save_tiny_gpt2, save_tiny_llama

CLOSE = 1e-4
"""Scores with smaller differences may be ranked either way: the sums are rounded in another order."""


class Searches:
    """The engine and transformers' `generate` over the same weights."""

    def __init__(self, directory: Path, model: Any, **options: Any) -> None:
        self.model = model
        settings = {"num_kv_blocks": 400, "block_size": 4, "max_num_seqs": 32, "num_threads": 1}
        self.llm = LLM(str(directory), **(settings | options))

    def reference(self, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
        """(tokens, score) per hypothesis, best first."""
        inputs = torch.tensor([prompt])
        stops = [*(() if params.ignore_eos else EOS), *params.stop_token_ids]
        with torch.inference_mode():
            found = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                num_beams=params.beam_width,
                num_return_sequences=params.n,
                max_new_tokens=params.max_tokens,
                min_new_tokens=params.min_tokens or None,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                repetition_penalty=params.repetition_penalty,
                eos_token_id=stops or None,
                pad_token_id=VOCAB_SIZE - 1,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
            )
        hypotheses = []
        for tokens, indices, score in zip(
            found.sequences, found.beam_indices, found.sequences_scores, strict=True
        ):
            length = int((indices >= 0).sum())
            hypotheses.append((tokens[len(prompt) : len(prompt) + length].tolist(), float(score)))
        return hypotheses

    def check(self, prompts: list[list[int]], params: list[SamplingParams]) -> int:
        """Compare all of them, run together; returns how many differed by less than rounding."""
        results = self.llm.generate(prompts, params, use_tqdm=False)
        close = sum(map(self._check_one, prompts, params, results))
        self.llm.engine.check_integrity()
        stats = self.llm.engine.stats()
        assert stats.kv.active_blocks == 0
        return close

    def _check_one(self, prompt: list[int], params: SamplingParams, result: GenerationOutput) -> bool:
        expected = self.reference(prompt, params)
        got = [output.token_ids for output in result.outputs]
        if got != [tokens for tokens, _ in expected]:
            ours = [
                (output.cumulative_logprob or 0.0) / len(output.token_ids) ** params.length_penalty
                for output in result.outputs
            ]
            gap = max(abs(a - b) / max(1.0, abs(b)) for a, (_, b) in zip(ours, expected, strict=True))
            assert gap < CLOSE, f"{prompt} with {params}: {got} scored {ours}, expected {expected}"
            return True
        for output, (tokens, score) in zip(result.outputs, expected, strict=True):
            assert output.cumulative_logprob is not None
            own = output.cumulative_logprob / len(tokens) ** params.length_penalty
            assert own == pytest.approx(score, rel=1e-5, abs=1e-4)
            is_stop = tokens[-1] in params.stop_token_ids or (tokens[-1] in EOS and not params.ignore_eos)
            assert output.finish_reason == ("stop" if is_stop else "length")
        return False


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Searches:
    directory = tmp_path_factory.mktemp("llama")
    return Searches(directory, save_tiny_llama(directory))


def random_prompt(rng: random.Random, longest: int = 20) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))]


def random_params(rng: random.Random) -> SamplingParams:
    width, max_tokens = rng.randint(2, 6), rng.randint(1, 14)
    ignore_eos = rng.random() < 0.15
    return SamplingParams(
        n=rng.randint(1, width),
        beam_width=width,
        max_tokens=max_tokens,
        # Ignored, EOS may still be excluded before min_tokens; transformers does not exclude it.
        min_tokens=0 if ignore_eos else rng.choice([0, 0, rng.randint(0, max_tokens)]),
        length_penalty=rng.choice([1.0, 1.0, 0.0, 0.5, 2.0, -1.0]),
        early_stopping=rng.choice([True, False, "never"]),
        ignore_eos=ignore_eos,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 4]))),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
    )


@pytest.mark.slow
def test_equals_transformers_over_random_prompts_and_settings(llama: Searches) -> None:
    rng = random.Random(0)
    prompts, params = zip(*((random_prompt(rng), random_params(rng)) for _ in range(40)), strict=True)
    assert llama.check(list(prompts), list(params)) <= 1


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
def test_equals_transformers_for_every_way_to_stop(
    llama: Searches, length_penalty: float, early_stopping: Any
) -> None:
    rng = random.Random(5)
    params = SamplingParams(
        n=3,
        beam_width=3,
        max_tokens=24,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=tuple(range(20, 26)),  # so that searches end long before max_tokens
    )
    llama.check([random_prompt(rng) for _ in range(2)], [params] * 2)


@pytest.mark.slow
def test_equals_transformers_over_many_more(tmp_path: Path) -> None:
    rng = random.Random(1)
    for save in (save_tiny_llama, save_tiny_gpt2):
        directory = tmp_path / save.__name__
        searches = Searches(directory, save(directory))
        jobs = [(random_prompt(rng), random_params(rng)) for _ in range(400)]
        assert searches.check([prompt for prompt, _ in jobs], [params for _, params in jobs]) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["depth 0", "depth 1"])
@pytest.mark.parametrize("host_cache_gib", [0.0, 0.01], ids=["recompute", "host tier"])
def test_equals_transformers_while_blocks_run_out(
    tmp_path: Path, async_scheduling: bool, host_cache_gib: float
) -> None:
    rng = random.Random(2)
    searches = Searches(
        tmp_path,
        save_tiny_llama(tmp_path),
        num_kv_blocks=34,
        max_num_batched_tokens=24,
        async_scheduling=async_scheduling,
        host_cache_gib=host_cache_gib,
    )
    prompts, params = zip(*((random_prompt(rng), random_params(rng)) for _ in range(16)), strict=True)
    searches.check(list(prompts), list(params))
    stats = searches.llm.engine.stats()
    assert stats.scheduler.preemptions > 0
    assert bool(stats.kv.host_loaded_blocks) == bool(host_cache_gib)


def test_the_offline_call_returns_every_beam_best_first(llama: Searches) -> None:
    prompts = [[5, 9, 11], [40, 41]]
    results = llama.llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=6), use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        params = SamplingParams(n=4, beam_width=4, max_tokens=6)
        assert [output.token_ids for output in result.outputs] == [
            tokens for tokens, _ in llama.reference(prompt, params)
        ]
        assert [output.index for output in result.outputs] == [0, 1, 2, 3]
        assert result.usage.completion_tokens == sum(len(output.token_ids) for output in result.outputs)


def test_logprobs_add_up_to_the_cumulative_one(llama: Searches) -> None:
    params = SamplingParams(n=2, beam_width=3, max_tokens=7, logprobs=2)
    (result,) = llama.llm.generate([[8, 9, 10]], params, use_tqdm=False)
    for output in result.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert sum(entry.logprob or 0.0 for entry in output.logprobs) == pytest.approx(
            output.cumulative_logprob
        )
        assert all(len(entry.top) == 2 for entry in output.logprobs)


def test_a_single_beam_is_the_greedy_output(llama: Searches) -> None:
    """Without other settings its single sequence looks like a sampled one to the scheduler."""
    beam, greedy = (
        llama.llm.generate([[8, 9, 10]], params, use_tqdm=False)[0].outputs[0]
        for params in (
            SamplingParams(beam_width=1, max_tokens=6),
            SamplingParams(temperature=0.0, max_tokens=6),
        )
    )
    assert beam.token_ids == greedy.token_ids


def test_where_constraints_leave_fewer_hypotheses_the_last_outputs_are_empty(llama: Searches) -> None:
    params = SamplingParams(n=3, beam_width=3, max_tokens=1, allowed_token_ids=(10, 11))
    (result,) = llama.llm.generate([[8, 9]], params, use_tqdm=False)
    assert sorted(output.token_ids for output in result.outputs) == [[], [10], [11]]
    assert result.outputs[2].token_ids == []


PROMPT = [5, 6, 7, 8, 9, 10]


def answer(plan: StepPlan, *candidates: list[tuple[int, float]]) -> StepResult:
    tokens = [[beam[0][0]] for beam in candidates]
    return StepResult(plan.step_id, tokens, candidates=dict(enumerate(candidates)))


class TestScheduling:
    """Rows, forks and blocks of the beams, step by step; blocks of 4."""

    def test_beams_fork_off_whichever_beam_they_continue(self) -> None:
        harness = Harness(make_config(enable_prefix_caching=False))
        request = harness.add(make_request("a", PROMPT, n=2, beam_width=2, max_tokens=4))
        first = harness.schedule()
        assert first is not None
        # One prefill, a sample for each beam, as many candidates as beams and one that may end a beam.
        assert [(sample.row, sample.num_candidates) for sample in first.samples] == [(0, 3), (1, 3)]
        assert harness.scheduler.capacity().free_rows == 6
        harness.update(first, answer(first, *[[(1, -0.1), (2, -0.2), (3, -5.0), (4, -6.0)]] * 2))
        harness.check()
        second = harness.schedule()
        assert second is not None
        assert second.block_copies == [(2, 3)]
        assert [work.forced_token_ids for work in second.work] == [[(6, 1)], [(6, 2)]]
        # Both best continuations are the second beam's: the first beam ends, and its row goes to the other's fork.
        harness.update(
            second,
            answer(
                second,
                [(1, -9.0), (2, -9.1), (3, -9.2), (4, -9.3)],
                [(7, -0.1), (8, -0.2), (9, -5.0), (9, -6.0)],
            ),
        )
        harness.check()
        third = harness.schedule()
        assert third is not None
        assert third.freed_rows == [0]
        assert [(new.row, new.token_ids) for new in third.new_rows] == [(0, [*PROMPT, 2, 8])]
        assert [beam.output_token_ids for beam in request.sequences] == [[2, 8], [2, 7]]
        assert harness.scheduler.kv_cache.stats().cow_copies == 2

    def test_a_preempted_beam_keeps_its_tokens_and_the_others_wait_for_it(self) -> None:
        harness = Harness(make_config(num_kv_blocks=14, enable_prefix_caching=False))
        old = harness.add(make_request("old", range(24), max_tokens=18))
        search = harness.add(make_request("s", [4, 5, 6], arrival=1.0, beam_width=3, max_tokens=12, n=3))
        for _ in range(20):
            if harness.scheduler.stats().preemptions:
                break
            harness.step()
        assert old.sequences[0].row is not None
        *held, lost = search.sequences
        assert lost.row is None
        assert len({len(beam.output_token_ids) for beam in search.sequences}) == 1
        harness.step()
        assert all(beam.is_held for beam in held if beam.row is not None)
        harness.run()
        assert harness.scheduler.stats().recomputed_tokens > 0

    def test_beams_that_wait_for_each_other_give_way_to_those_they_wait_for(self) -> None:
        """A preempted beam no longer shares the prompt's blocks, and all beams together do not fit."""
        harness = Harness(make_config(num_kv_blocks=8, enable_prefix_caching=False))
        harness.add(make_request("old", range(8), max_tokens=12))
        search = harness.add(make_request("s", PROMPT, arrival=1.0, beam_width=3, max_tokens=7, n=3))
        harness.run()
        assert harness.scheduler.stats().preemptions > 3
        assert all(beam.finish_reason == "length" for beam in search.sequences)

    def test_an_aborted_search_gives_everything_back_and_has_no_output(self) -> None:
        harness = Harness(make_config())
        search = harness.add(make_request("s", PROMPT, n=2, beam_width=4, max_tokens=12))
        for _ in range(4):
            harness.step()
        updates = harness.abort("s")
        assert [update.sequence.index for update in updates] == [0, 1]
        assert all(beam.finish_reason == "abort" and not beam.output_token_ids for beam in search.sequences)
        harness.check_idle()

    def test_many_stop_tokens_cost_few_candidates(self) -> None:
        harness = Harness(make_config())
        stops = tuple(range(100, 1100))
        harness.add(make_request("a", PROMPT, n=8, beam_width=8, max_tokens=4, stop_token_ids=stops))
        step = harness.schedule()
        assert step is not None
        assert {sample.num_candidates for sample in step.samples} <= {8 + len(stops), 9 + len(stops)}

    def test_a_width_that_never_fits_is_refused(self) -> None:
        with pytest.raises(NeverFits):
            Harness(make_config(max_num_seqs=2)).add(make_request("s", PROMPT, beam_width=3))


def test_every_pair_of_settings_was_drawn() -> None:
    """The random settings do cover the intended cases."""
    rng = random.Random(0)
    drawn = set()
    for _ in range(40):
        random_prompt(rng)
        params = random_params(rng)
        drawn.add((params.early_stopping, params.length_penalty > 0))
    assert drawn == set(itertools.product([True, False, "never"], [True, False]))
