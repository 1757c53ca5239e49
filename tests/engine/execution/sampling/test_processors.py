"""The effect of parameters on logits, against transformers' processors and definitions in plain Python."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagemill.engine.execution.sampling.filters import filter_logits
from pagemill.engine.execution.sampling.processors import LogitsProcessors, SampleWork
from pagemill.engine.execution.sampling.sampler import Sampler
from pagemill.engine.execution.staging import DirectTransfer
from pagemill.engine.plan import NewRow, Sample, StepResult
from pagemill.engine.sampling_params import SamplingParams

VOCAB_SIZE = 40
EOS = (3, 9)
# Prompts and outputs use separate tokens, so that a processor that reads the wrong ones is detected.
PROMPT_TOKENS = range(20, 30)
OUTPUT_TOKENS = range(10)
SAMPLES = 8


def make_work(
    params: SamplingParams,
    output: list[int],
    *,
    row: int = 0,
    prompt: tuple[int, ...] = (21, 24, 20),
    bad_words: tuple[tuple[int, ...], ...] = (),
    allowed: list[int] | None = None,
    mask: set[int] | None = None,
) -> SampleWork:
    new_row = NewRow(row, "r", 0, list(prompt), len(prompt), [1], params, 7, bad_words)
    sample = Sample(row, row, len(prompt) + len(output), allowed)
    if mask is not None:
        sample.token_mask = sum(1 << token for token in mask).to_bytes(VOCAB_SIZE // 8, "little")
    return SampleWork(sample, new_row)


def tokens_of(work: SampleWork, output: list[int]) -> list[int]:
    return work.row.token_ids + output


def apply(logits: torch.Tensor, work: list[SampleWork], outputs: list[list[int]]) -> torch.Tensor:
    """The rest of every row's table is garbage, as after a longer sequence."""
    table = torch.randint(VOCAB_SIZE, (1 + max(item.row.row for item in work), 32))
    for item, output in zip(work, outputs, strict=True):
        tokens = tokens_of(item, output)
        table[item.row.row, : len(tokens)] = torch.tensor(tokens)
    logits = logits.clone()
    before = logits.clone()
    changes = LogitsProcessors(EOS).stage(work, VOCAB_SIZE, DirectTransfer(logits.device))
    if changes is not None:
        changes.apply(logits, table)
    changed = [] if changes is None else changes.samples.tolist()
    for number in range(len(work)):
        assert number in changed or torch.equal(logits[number], before[number])
    return logits


def by_transformers(logits: torch.Tensor, work: SampleWork, output: list[int]) -> torch.Tensor:
    params = work.params
    ids = torch.tensor([tokens_of(work, output)])
    prompt_length = work.row.num_prompt_tokens
    scores = logits[None].clone()
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(t,): float(b) for t, b in params.logit_bias.items()})(
            ids, scores
        )
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token, count in Counter(output).items():
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * count
    if params.min_tokens:
        ends = [*EOS, *params.stop_token_ids]
        scores = MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, ends)(ids, scores)
    if work.row.bad_word_ids:
        scores = NoBadWordsLogitsProcessor([list(word) for word in work.row.bad_word_ids])(ids, scores)
    for allowed in (params.allowed_token_ids, work.sample.allowed_token_ids):
        if allowed is not None:
            barred = torch.ones(VOCAB_SIZE, dtype=torch.bool)
            barred[list(allowed)] = False
            scores[0, barred] = -torch.inf
    return scores[0]


def random_case(rng: random.Random, row: int) -> tuple[SampleWork, list[int]]:
    output = rng.choices(OUTPUT_TOKENS, k=rng.randrange(7))
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
    for name, value in {
        "repetition_penalty": rng.choice([0.7, 1.3, 2.0]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9) for _ in range(4)},
        "min_tokens": rng.randrange(8),
        "stop_token_ids": (5, 30),
        "allowed_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 30)),
    }.items():
        if rng.random() < 0.4:
            params[name] = value
    bad_words = tuple(
        dict.fromkeys(tuple(rng.choices(OUTPUT_TOKENS, k=rng.randint(1, 3))) for _ in range(rng.randrange(6)))
    )
    allowed = rng.sample(range(VOCAB_SIZE), 20) if rng.random() < 0.2 else None
    return make_work(SamplingParams(**params), output, row=row, bad_words=bad_words, allowed=allowed), output


@pytest.mark.parametrize("seed", range(40))
def test_a_mixed_batch_is_what_transformers_makes_of_each_row(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cases = [random_case(rng, row) for row in range(SAMPLES)]
    work, outputs = [item for item, _ in cases], [output for _, output in cases]
    logits = torch.randn(SAMPLES, VOCAB_SIZE) * 4
    batch = apply(logits, work, outputs)
    for number in range(SAMPLES):
        expected = by_transformers(logits[number], work[number], outputs[number])
        torch.testing.assert_close(batch[number], expected, rtol=1e-6, atol=1e-6)
        alone = apply(logits[number : number + 1], [work[number]], [outputs[number]])
        assert torch.equal(alone[0], batch[number]), "a row depends on its batch"


def barred(work: SampleWork, output: list[int]) -> set[int]:
    row = apply(torch.randn(1, VOCAB_SIZE), [work], [output])[0]
    return {token for token in range(VOCAB_SIZE) if row[token] == -torch.inf}


def test_a_long_bad_word_costs_the_short_ones_no_memory() -> None:
    words = (*((token,) for token in OUTPUT_TOKENS), (*[1] * 4095, 2))
    early, late = (make_work(SamplingParams(), [1] * count, bad_words=words) for count in (3, 4095))
    for work, widths in ((early, [0]), (late, [0, 4095])):
        changes = LogitsProcessors(EOS).stage([work] * 8, VOCAB_SIZE, DirectTransfer(torch.device("cpu")))
        assert changes is not None
        assert [bars.prefixes.shape[1] for bars in changes.bars] == widths
        assert changes.bars[0].prefixes.numel() == 0
        assert len(changes.bars[0].samples) == 8 * len(OUTPUT_TOKENS)


def test_a_long_row_costs_the_short_ones_no_time() -> None:
    short, long = (make_work(SamplingParams(presence_penalty=1.0), [1] * count) for count in (20, 4000))
    work = [short] * 15 + [long]
    changes = LogitsProcessors(EOS).stage(work, VOCAB_SIZE, DirectTransfer(torch.device("cpu")))
    assert changes is not None
    sizes = sorted((penalties.longest, len(penalties.samples)) for penalties in changes.penalties)
    assert sizes == [(short.sample.position, 15), (long.sample.position, 1)]


def test_a_bad_word_is_barred_where_its_beginning_has_just_come() -> None:
    def bars(output: list[int], *words: tuple[int, ...], prompt: tuple[int, ...] = (21,)) -> set[int]:
        return barred(make_work(SamplingParams(), output, prompt=prompt, bad_words=words), output)

    assert bars([], (4,)) == {4}
    assert bars([], (1, 2), (1, 2, 3)) == set()
    assert bars([1], (1, 2), (1, 2, 3), (5,)) == {2, 5}
    assert bars([0, 1, 2], (1, 2), (1, 2, 3)) == {3}
    assert bars([1, 2, 0], (1, 2, 3)) == set()
    assert bars([1, 1], (1, 1, 1)) == {1}
    assert bars([2], (1, 2, 3), prompt=(21, 1)) == set(), "the prompt is not the model's to avoid"
    assert bars([7], (7, 2), (8, 2)) == {2}, "two words with one last token"


def test_a_grammar_s_mask_holds_whatever_else_is_asked() -> None:
    every = set(range(VOCAB_SIZE))

    def kept(mask: set[int], output: list[int] | None = None, **params: Any) -> set[int]:
        bad_words = params.pop("bad_words", ())
        work = make_work(SamplingParams(**params), output or [], mask=mask, bad_words=bad_words)
        return every - barred(work, output or [])

    assert kept({5, 17, 39}) == {5, 17, 39}
    assert kept({5, 17, 39}, allowed_token_ids=(17, 20)) == {17}
    assert kept({5, 17}, allowed_token_ids=(18, 20)) == set(), "nothing in common"
    assert kept({3, 5}, min_tokens=4, max_tokens=9) == {5}
    assert kept({3}, min_tokens=4, max_tokens=9) == {3}, "the structure is at its end"
    assert kept({3, 5}, min_tokens=4, max_tokens=9, bad_words=((5,),)) == set()
    assert kept({5, 6}, bad_words=((5,),)) == {6}
    assert kept({5}, bad_words=((5,),)) == set()


def test_no_bar_gives_way_to_another() -> None:
    every = set(range(VOCAB_SIZE))
    work = make_work(SamplingParams(allowed_token_ids=(4, 5)), [], bad_words=((4,), (5,)))
    assert barred(work, []) == every
    stops = tuple(range(VOCAB_SIZE))
    assert barred(make_work(SamplingParams(min_tokens=1, stop_token_ids=stops), []), []) == every


def test_a_bias_of_whole_numbers_is_added() -> None:
    row = apply(torch.zeros(1, VOCAB_SIZE), [make_work(SamplingParams(logit_bias={5: 100}), [])], [[]])[0]
    assert row[5] == 100.0


def test_a_row_s_constraints_are_those_of_the_sequence_that_holds_it() -> None:
    processors, table = LogitsProcessors(EOS), torch.zeros(1, 8, dtype=torch.int64)
    first = make_work(SamplingParams(allowed_token_ids=(1,)), [])
    second = make_work(SamplingParams(allowed_token_ids=(2,)), [])
    for work, token in ((first, 1), (second, 2), (first, 1)):
        logits = torch.zeros(1, VOCAB_SIZE)
        changes = processors.stage([work], VOCAB_SIZE, DirectTransfer(logits.device))
        assert changes is not None
        changes.apply(logits, table)
        assert logits[0].isfinite().nonzero().flatten().tolist() == [token]


@pytest.mark.parametrize("vocab_size", [50, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_filters_keep_what_transformers_keeps(seed: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    flat = 0.01 if seed == 3 else 3.0  # so flat that top-p needs most of the vocabulary
    params = [
        SamplingParams(
            temperature=rng.choice([0.3, 1.0, 2.5]),
            top_k=rng.choice([0, -1, 1, 7, 40, 10**6]),
            top_p=rng.choice([1.0, 0.05, 0.5, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.02, 0.3]),
        )
        for _ in range(12)
    ]
    logits = torch.randn(len(params), vocab_size) * flat
    scaled = logits / torch.tensor([p.temperature for p in params])[:, None]
    filtered = scaled.clone()
    filter_logits(filtered, params)
    for number, p in enumerate(params):
        expected = TemperatureLogitsWarper(p.temperature)(torch.zeros(1, 1), logits[number : number + 1])
        if p.top_k > 0:
            expected = TopKLogitsWarper(p.top_k)(torch.zeros(1, 1), expected)
        if p.top_p < 1.0:
            expected = TopPLogitsWarper(p.top_p)(torch.zeros(1, 1), expected)
        if p.min_p > 0.0:
            expected = MinPLogitsWarper(p.min_p)(torch.zeros(1, 1), expected)
        torch.testing.assert_close(filtered[number], expected[0])
        alone = scaled[number : number + 1].clone()
        filter_logits(alone, [p])
        assert torch.equal(alone[0], filtered[number])


def test_candidates_are_the_best_log_probabilities_under_the_constraints() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, VOCAB_SIZE)
    searching = make_work(SamplingParams(temperature=0.0, logit_bias={8: 3.0}), [], bad_words=((2,),))
    searching.sample.num_candidates = VOCAB_SIZE
    plain = make_work(SamplingParams(temperature=0.0), [], row=1)
    output = Sampler(EOS).sample(logits.clone(), [searching, plain], torch.zeros(2, 8, dtype=torch.int64))
    expected = logits[0].log_softmax(0)
    expected[8] += 3.0
    output.fill(result := StepResult(0, []), iter(output.tensors()))
    candidates = result.candidates
    assert set(candidates) == {0}
    assert [token for token, _ in candidates[0]] == [
        t for t in expected.argsort(descending=True).tolist() if t != 2
    ]
    assert dict(candidates[0]) == pytest.approx({t: float(expected[t]) for t in range(VOCAB_SIZE) if t != 2})
