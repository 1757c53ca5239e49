"""Steps that compute only the logits of a few tokens make the same choice as among all logits."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.execution.sampling import narrow_head
from pagemill.engine.execution.sampling.narrow_head import NarrowHead, NarrowVocabulary
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.sampling.sampler import Sampler
from pagemill.engine.layers.linear import Linear, LinearOptions
from pagemill.engine.llm import LLM
from pagemill.engine.plan import NewRow, Sample
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.cpu.matmul import fp32
from tests.engine.models.families.native_cases import NATIVE_CASES, write_llama
from tests.engine.models.families.tiny import VOCAB_SIZE

SIZE = 200
needs_own_kernel = pytest.mark.skipif(not fp32.is_supported(), reason="made for AVX2 and AVX-512")


def int8_head(out_features: int = SIZE, in_features: int = 19) -> Linear:
    return head(out_features, in_features, "int8")


def head(out_features: int = SIZE, in_features: int = 19, quantization: str | None = None) -> Linear:
    torch.manual_seed(5)
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    product = CpuBackend().product([weight], bias, LinearOptions(quantization))
    assert product is not None
    return Linear(product, in_features, out_features)


class Model:
    """The model that a head belongs to."""

    def __init__(self, layer: Any) -> None:
        self.get_output_embeddings = lambda: layer


def make_work(
    row: int, allowed: list[int] | None, params: SamplingParams, mask: bytes | None = None
) -> SampleWork:
    new_row = NewRow(row, f"r{row}", row % 3, [0, 1], 2, [1], params, seed=100 + row)
    return SampleWork(Sample(row, row, 2 + row % 5, allowed, mask), new_row)


@needs_own_kernel
def test_selected_channels_have_the_bits_that_they_have_in_the_whole_product() -> None:
    rng = random.Random(1)
    for out_features, in_features in ((SIZE, 19), (33, 64), (64, 7), (1, 5)):
        layer = head(out_features, in_features)
        for count in (1, out_features // 2 + 1):
            channels = torch.tensor(sorted(rng.sample(range(out_features), min(count, out_features))))
            for num_rows in (1, 5, 30):
                x = torch.randn(num_rows, in_features)
                selected = layer.of_channels(channels)
                assert selected is not None
                assert torch.equal(selected(x), layer(x)[:, channels])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selected_channels_of_int8_weights_have_their_bits_too(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for out_features, in_features in ((SIZE, 19), (33, 64), (64, 7), (1, 5)):
        layer = int8_head(out_features, in_features)
        for count in (1, out_features // 2 + 1):
            channels = torch.tensor(rng.sample(range(out_features), min(count, out_features)))
            selected = layer.of_channels(channels)
            assert selected is not None
            for num_rows in (1, 5, 30):
                x = torch.randn(1, num_rows, in_features).to(dtype)
                assert torch.equal(selected(x), layer(x)[..., channels])


def test_int8_without_the_compiler_keeps_the_head_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "numba" else find_spec(name, *rest)
    )
    assert NarrowHead.from_module(Model(int8_head())) is None


@needs_own_kernel
def test_outside_the_block_the_head_computes_everything() -> None:
    layer = head()
    narrow, x = NarrowHead(layer), torch.randn(4, 19)
    whole = layer(x)
    with narrow.only((3, 40)):
        assert torch.equal(layer(x), whole[:, [3, 40]])
    assert torch.equal(layer(x), whole)


@needs_own_kernel
@pytest.mark.parametrize("seed", range(12))
def test_the_same_tokens_are_chosen_from_few_logits_as_from_all(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.choice([1, 3, 40])
    pool = rng.sample(range(SIZE), rng.randint(1, 60))
    shared = rng.sample(pool, rng.randint(1, len(pool)))
    work = []
    for row in range(num_rows):
        own = shared if seed % 2 else rng.sample(pool, rng.randint(1, len(pool)))
        temperature = rng.choice([0.0, 1e-3, 0.7, 1.0, 5.0])
        by_grammar = rng.random() < 0.5
        params = SamplingParams(temperature=temperature, allowed_token_ids=None if by_grammar else tuple(own))
        work.append(make_work(row, own if by_grammar else None, params))
    # Coarse values: many logits are equal, and the lowest id must win.
    logits = (torch.randn(num_rows, SIZE) * 2).round() / 2
    vocabulary = NarrowHead(head()).vocabulary(work)
    assert vocabulary is not None
    expected = Sampler(()).sample(logits.clone(), work, torch.zeros(num_rows, 32, dtype=torch.int64))
    got = Sampler.sample_narrow(logits[:, list(vocabulary.token_ids)], work, vocabulary)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.is_valid.tolist() == [True] * num_rows


def test_draws_from_few_logits_and_from_all_agree_for_many_seeds() -> None:
    few = [3, 17, 18, 90, 199]
    work = [make_work(row, few, SamplingParams()) for row in range(2000)]
    logits = torch.randn(1, SIZE).expand(2000, -1)
    expected = Sampler(()).sample(logits.clone(), work, torch.zeros(2000, 32, dtype=torch.int64)).token_ids
    got = Sampler.sample_narrow(logits[:, few].clone(), work, NarrowVocabulary(tuple(few))).token_ids
    assert got.tolist() == expected.tolist()
    assert set(got.tolist()) == set(few)


def test_logits_that_are_not_finite_are_told() -> None:
    work = [make_work(row, [3, 5], SamplingParams(temperature=float(row))) for row in range(2)]
    logits = torch.tensor([[torch.nan, torch.nan]] * 2)
    output = Sampler.sample_narrow(logits, work, NarrowVocabulary((3, 5)))
    assert output.is_valid.tolist() == [False, False]
    assert set(output.token_ids.tolist()) <= {3, 5}


@needs_own_kernel
@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0}, {"logit_bias": {5: 1.0}}, {"min_tokens": 1}, {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1},
        {"allowed_token_ids": (4, 5)},
    ],
    ids=str,
)  # fmt: skip
def test_whoever_asks_for_more_than_a_choice_gets_all_logits(options: dict[str, Any]) -> None:
    narrow = NarrowHead(head())
    plain = make_work(0, [5, 4], SamplingParams())
    assert narrow.vocabulary([plain]) == NarrowVocabulary((4, 5))
    assert narrow.vocabulary([plain, make_work(1, [4], SamplingParams(**options))]) is None


@needs_own_kernel
def test_free_rows_and_wide_choices_need_all_logits() -> None:
    narrow, params = NarrowHead(head(600)), SamplingParams()
    most = narrow_head.MOST_TOKENS
    few = make_work(0, [1, 2], params)
    assert narrow.vocabulary([few, make_work(1, list(range(most)), params)]) is not None
    for other in (
        make_work(1, None, params),
        make_work(1, None, SamplingParams(allowed_token_ids=(1, 2)), mask=b"\x06"),
        make_work(1, list(range(most + 1)), params),
        make_work(1, list(range(3, most + 3)), params),  # too many together
        make_work(1, [600], params),
    ):
        assert narrow.vocabulary([few, other]) is None
    assert narrow.vocabulary([]) == narrow_head.NOTHING_SAMPLED


def test_a_head_without_single_channels_stays_whole() -> None:
    assert NarrowHead.from_module(Model(torch.nn.Linear(4, 9))) is None


@contextmanager
def everything_computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(narrow_head, "MOST_TOKENS", 0)
        yield


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in the logits of each narrow step."""
    seen: list[int] = []
    narrow = Sampler.sample_narrow

    def spy(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits.shape[1])
        return narrow(logits, *rest)

    monkeypatch.setattr(Sampler, "sample_narrow", staticmethod(spy))
    return seen


@pytest.mark.slow
@needs_own_kernel
@pytest.mark.parametrize(
    "case", ["gemma2", "gpt2", "gptj", "bloom", "mpt", "falcon, as its 7b", "phi", "qwen3"]
)
def test_a_familys_outputs_are_the_same(
    case: str, tmp_path: Path, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all operations after the matmul: a bias, a softcap, tied weights."""
    checkpoint = NATIVE_CASES[case]()
    checkpoint.write(tmp_path)
    llm = LLM(str(tmp_path), num_threads=1, num_kv_blocks=64, block_size=4, **checkpoint.options)
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in range(8)]
    params = [
        SamplingParams(
            max_tokens=4,
            temperature=rng.choice([0.0, 1.0, 4.0]),
            seed=number,
            allowed_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.randint(2, 12))),
        )
        for number in range(len(prompts))
    ]

    def run() -> list[list[int]]:
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]

    got = run()
    assert widths
    narrow_steps = len(widths)
    with everything_computed(monkeypatch):
        assert run() == got
    assert len(widths) == narrow_steps


@pytest.mark.slow
def test_an_int8_models_choices_are_the_same(
    tmp_path: Path, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(write_llama(tmp_path))
    llm = LLM(directory, num_threads=1, num_kv_blocks=64, block_size=4, quantization="int8")
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3, allowed_token_ids=(1, 2, 9, 40, 41))

    def run() -> list[list[int]]:
        prompts = [[number, 7, 8] for number in range(6)]
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]

    got = run()
    assert set(widths) == {5}
    widths.clear()
    with everything_computed(monkeypatch):
        assert run() == got
    assert not widths


LABELS = ("positive", "negative", "neutral", "mixed", "posit", "other one", "other two")


def labeling(count: int, num_free: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(3)
    prompts, params = [], []
    for number in range(count):
        prompts.append(f"Review {number}: {'good ' * rng.randint(1, 5)} The label is")
        labels = rng.sample(LABELS, rng.randint(2, len(LABELS)))
        is_free = number < num_free
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 0.8, 3.0]),
                seed=number,
                max_tokens=1 if is_free else 6,
                structured_outputs=None if is_free else StructuredOutputs(choice=tuple(labels)),
            )
        )
    return prompts, params


@pytest.fixture(scope="module")
def small_model() -> LLM:
    return LLM("smollm2", num_threads=1, num_kv_blocks=64, max_model_len=64, max_num_seqs=3)


@pytest.mark.slow
@needs_own_kernel
@pytest.mark.parametrize("num_free", [0, 1], ids=["labels alone", "beside a free row"])
def test_labels_are_the_same_in_every_order(
    num_free: int, small_model: LLM, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free row's step needs all logits; later ones, with more rows than one step accepts, do not."""
    prompts, params = labeling(7, num_free)
    with everything_computed(monkeypatch):
        expected = [result.outputs[0] for result in small_model.generate(prompts, params, use_tqdm=False)]
    assert not widths
    for order in (range(len(prompts)), [*range(len(prompts))][::-1]):
        results = small_model.generate(
            [prompts[number] for number in order], [params[number] for number in order], use_tqdm=False
        )
        for number, result in zip(order, results, strict=True):
            got = result.outputs[0]
            assert (got.text, got.token_ids) == (expected[number].text, expected[number].token_ids)
    assert widths
    assert max(widths) <= 2 * len(LABELS)
    small_model.engine.check_integrity()


@needs_own_kernel
def test_a_row_that_computes_nan_fails_alone_in_a_narrow_step(tmp_path: Path, widths: list[int]) -> None:
    llm = LLM(str(write_llama(tmp_path)), num_threads=1, num_kv_blocks=64, block_size=4)
    runner: Any = llm.engine._parts.executor  # the embedding of one token becomes NaN
    embedding = runner._model.loaded.module.get_input_embeddings().weight
    with torch.inference_mode():
        embedding[50] = torch.nan
    params = SamplingParams(temperature=0.0, max_tokens=3, allowed_token_ids=(1, 2, 9))
    results = llm.generate([[4, 5], [4, 50], [6, 7]], params, use_tqdm=False)
    assert [result.outputs[0].finish_reason for result in results] == ["length", "error", "length"]
    assert widths
