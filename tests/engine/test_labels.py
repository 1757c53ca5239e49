"""`label_probs`: the probability of every label equals transformers', for any schedule of the labels' tokens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dense import dense_smollm2
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.engine import Engine
from pagemill.engine.errors import (
    InvalidRequest,
    NeverFits,
    PromptTooLong,
    SchemaTooComplex,
    UnsupportedFeature,
)
from pagemill.engine.llm import LLM, CompletionOutput
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Generate, Outline
from pagemill.engine.text.tokenizer import ByteTokenizer
from tests.engine.tiny_model import save_tiny_llama, save_tiny_ministral

KINDS = ["product", "mean", "constrained"]
PROMPT = "Is this a question? "
LABELS = ["yes", "no", "yes!", "yes, but", "No", " no", "späte Antwort", "n", "日本"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model of bytes: each label has as many tokens as bytes."""
    directory = tmp_path_factory.mktemp("bytes")
    tokenizer = ByteTokenizer()
    model = save_tiny_llama(
        directory, vocab_size=tokenizer.vocab_size, eos=(tokenizer.eos_token_id,), std=0.3
    )
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return directory, model


def engine_of(directory: Path, **settings: Any) -> Engine:
    options = {"num_kv_blocks": 64, "block_size": 4, "num_threads": 1, "device": "cpu", "dtype": "float32"}
    return LLM(str(directory), **(options | settings)).engine


def asking(labels: list[str], kind: str = "product", **more: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs=StructuredOutputs(choice=tuple(labels)), label_probs=kind, **more
    )


def add(engine: Engine, name: str, prompt: str, params: SamplingParams) -> None:
    token_ids, params = engine.input_processor.process(prompt=prompt, params=params)
    engine.add_request(name, token_ids, params)


def run(engine: Engine) -> dict[str, CompletionOutput]:
    found: dict[str, CompletionOutput] = {}
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            last[output.request_id] = output
            for delta in output.deltas:
                assert delta.index == 0
                found.setdefault(output.request_id, CompletionOutput(0)).extend(delta)
        engine.check_integrity()
    assert all(output.error is None and output.finished for output in last.values()), last
    return found


def tokens_of(tokenizer: Any, labels: list[str], eos: int) -> list[list[int]]:
    """The written definition: a label's own tokens, and the end token if another label extends it."""
    tokens = [tokenizer.encode(label) for label in labels]
    return [
        [*ids, eos] if any(other[: len(ids)] == ids and other != ids for other in tokens) else ids
        for ids in tokens
    ]


def by_transformers(model: Any, prompt: list[int], labels: list[list[int]], kind: str) -> list[float]:
    """Score each label by a separate forward pass."""
    scores = []
    for label in labels:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + label])).logits[0].double()
        score = 0.0
        for place, token in enumerate(label):
            row = logits[len(prompt) + place - 1]
            if kind == "constrained":
                begun = [ids for ids in labels if ids[:place] == label[:place]]
                row = row[sorted({ids[place] for ids in begun})]
                token = sorted({ids[place] for ids in begun}).index(token)
            score += row.log_softmax(-1)[token].item()
        scores.append(score / len(label) if kind == "mean" else score)
    return torch.tensor(scores, dtype=torch.float64).softmax(-1).tolist()


def check(model: Any, output: CompletionOutput, prompt: str, labels: list[str], kind: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_token_id is not None
    tokens = tokens_of(tokenizer, labels, tokenizer.eos_token_id)
    wanted = by_transformers(model, tokenizer.encode(prompt), tokens, kind)
    assert output.label_probs == pytest.approx(wanted, abs=1e-5, rel=1e-4)
    assert math.fsum(output.label_probs or ()) == pytest.approx(1.0, abs=1e-12)
    best = max(range(len(labels)), key=(output.label_probs or ()).__getitem__)
    assert (output.text, output.token_ids) == (labels[best], tokens[best])
    assert output.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 9},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "async_scheduling": True},
        {"num_kv_blocks": 14, "max_num_batched_tokens": 64},
        {"num_kv_blocks": 14, "host_cache_gib": 0.001, "async_scheduling": True},
        {"pad_to_bucket": True, "stage_inputs": True},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_probabilities_are_transformers(saved: tuple[Path, Any], settings: dict[str, Any], kind: str) -> None:
    directory, model = saved
    engine = engine_of(directory, **settings)
    draw = random.Random(1)
    asked = {"all": (PROMPT, LABELS), "two": (PROMPT[:7], ["ab", "a"]), "one": ("x", ["only"])}
    for number in range(8):
        words = {"".join(draw.choices("ab ", k=draw.randrange(1, 6))) for _ in range(draw.randrange(2, 9))}
        asked[str(number)] = PROMPT[: draw.randrange(1, 20)], sorted(words, key=hash)
    for name, (prompt, labels) in asked.items():
        add(engine, name, prompt, asking(labels, kind))
    beside = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    add(engine, "beside", PROMPT, beside)
    found = run(engine)
    for name, (prompt, labels) in asked.items():
        check(model, found[name], prompt, labels, kind)
    assert len(found["beside"].token_ids) == 12
    assert engine.capacity().free_rows == engine.limits.max_num_seqs
    assert engine.capacity().available_blocks == engine.limits.num_kv_blocks - 1
    engine.close()


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"max_num_seqs": 2}], ids=str)
@pytest.mark.parametrize("kinds", [["full_attention", "sliding_attention"], ["sliding_attention"]], ids=str)
def test_chains_fork_off_tokens_that_windows_have_left_behind(
    kinds: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_token_id is not None
    model = save_tiny_ministral(
        tmp_path, kinds, vocab_size=tokenizer.vocab_size, eos=[tokenizer.eos_token_id], std=0.3
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    engine = engine_of(tmp_path, num_kv_blocks=200, **settings)
    way = "a label of many more tokens than a window has"
    labels = [way, way[:3], *(way[:length] + "!" for length in (1, 9, 22, 23, 40))]
    add(engine, "labels", PROMPT, asking(labels))
    check(model, run(engine)["labels"], PROMPT, labels, "product")
    assert engine.stats().kv.window_frees > 0


def test_every_prefix_is_computed_once(saved: tuple[Path, Any]) -> None:
    """The tokens that pass through the model are the prompt's and the inner nodes of the labels' tree."""
    engine = engine_of(saved[0], enable_prefix_caching=False)
    labels = [f"class {group}{number}" for group in "abc" for number in range(10)]
    nodes = {label[:length] for label in labels for length in range(1, len(label))}
    add(engine, "tree", PROMPT, asking(labels))
    run(engine)
    assert engine.stats().steps.computed_tokens == len(PROMPT) + len(nodes)


@pytest.mark.parametrize("labels", [["alpha", "beta", "gamma"], ["a", "b"]], ids=["long", "short"])
def test_labels_that_differ_at_once_take_no_token_more_than_a_choice(
    saved: tuple[Path, Any], labels: list[str]
) -> None:
    computed = []
    for kind in (None, "constrained"):
        engine = engine_of(saved[0])
        add(engine, "one", PROMPT, asking(labels, kind))  # type: ignore[arg-type]
        steps = 0
        while engine.has_unfinished():
            engine.step()
            steps += 1
        computed.append((engine.stats().steps.computed_tokens, steps))
    assert computed == [(len(PROMPT), 1)] * 2


def test_two_hundred_labels_in_few_rows(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory, max_num_seqs=4)
    labels = [f"{number:03}" for number in range(200)]
    add(engine, "many", "x", asking(labels))
    check(model, run(engine)["many"], "x", labels, "product")


def test_many_characters_are_tokenised_in_the_background(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory, num_kv_blocks=200)
    labels = [f"{number}" * 250 for number in range(1, 10)] + ["1" * 260]
    add(engine, "long", "x", asking(labels))
    errors = []
    while engine.has_unfinished():
        errors += [(output.error_code, output.finished) for output in engine.step()]
    assert errors == [(PromptTooLong.code, True)]
    labels = [letter * 240 for letter in "abcdefghij"]
    add(engine, "wide", "x", asking(labels, "mean"))
    check(model, run(engine)["wide"], "x", labels, "mean")


def test_labels_that_tie_are_chosen_in_their_order() -> None:
    """echo scores tokens by their ids, in any order."""
    llm = LLM("echo")
    (result,) = llm.generate("zz", asking(["ba", "ab"], "mean"))
    (output,) = result.outputs
    assert output.label_probs == pytest.approx([0.5, 0.5])
    assert output.text == "ba"


@pytest.mark.parametrize("when", range(6))
def test_one_can_be_aborted(saved: tuple[Path, Any], when: int) -> None:
    engine = engine_of(saved[0], max_num_batched_tokens=9, enable_prefix_caching=False)
    add(engine, "gone", PROMPT, asking(LABELS))
    for _ in range(when):
        engine.step()
    (output,) = engine.abort("gone")
    assert output.finished
    assert output.usage is not None
    assert output.usage.completion_tokens == 0
    assert [delta.finish_reason for delta in output.deltas] == ["abort"]
    engine.check_integrity()
    assert not run(engine)
    assert engine.capacity().available_blocks == 63


@pytest.mark.parametrize(
    "settings", [{}, {"enable_prefix_caching": False}, {"host_cache_gib": 0.001}], ids=str
)
def test_one_that_is_preempted_goes_on(saved: tuple[Path, Any], settings: dict[str, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory, num_kv_blocks=14, max_num_batched_tokens=2, **settings)
    add(engine, "busy", "abcd", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    engine.step()
    prompt, labels = "a prompt that is taken a token a step", ["yes", "yes, sir", "no", "n"]
    add(engine, "labels", prompt, asking(labels))
    found = run(engine)
    check(model, found["labels"], prompt, labels, "product")
    assert len(found["busy"].token_ids) == 30
    assert engine.stats().scheduler.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_between(saved: tuple[Path, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks and rows, other requests, preemptions, aborts and failing steps do not change a probability."""
    directory, model = saved
    draw = random.Random(seed)
    engine = engine_of(
        directory,
        num_kv_blocks=draw.choice([16, 24, 64]),
        max_num_seqs=draw.choice([1, 2, 5, 16]),
        max_num_batched_tokens=draw.choice([3, 8, 64]),
        async_scheduling=draw.random() < 0.5,
        **draw.choice([{}, {"host_cache_gib": 0.001}, {"enable_prefix_caching": False}]),
    )
    executor = engine._parts.executor
    launch, failing = type(executor).launch, {draw.randrange(40) for _ in range(draw.choice([0, 1]))}

    def launched(self: Any, plan: Any) -> Any:
        if plan.step_id in failing:
            failing.discard(plan.step_id)
            raise RuntimeError("for the test")
        return launch(self, plan)

    monkeypatch.setattr(type(executor), "launch", launched)
    asked: dict[str, tuple[str, list[str], str]] = {}
    for number in range(12):
        words = {"".join(draw.choices("ab ", k=draw.randrange(1, 7))) for _ in range(draw.randrange(2, 12))}
        asked[str(number)] = PROMPT[: draw.randrange(1, 20)], sorted(words), draw.choice(KINDS)
        add(engine, str(number), asked[str(number)][0], asking(*asked[str(number)][1:]))
        busy = SamplingParams(max_tokens=draw.randrange(1, 25), temperature=0.0, ignore_eos=True)
        add(engine, f"busy {number}", PROMPT[:number], busy) if number else None
    found: dict[str, CompletionOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            for delta in output.deltas:
                found.setdefault(output.request_id, CompletionOutput(0)).extend(delta)
            assert output.error is None
        if draw.random() < 0.1:
            engine.abort(draw.choice(list(asked)))
        engine.check_integrity()
    ended = {name for name, output in found.items() if output.finish_reason == "stop" and name in asked}
    for name in ended:
        check(model, found[name], *asked[name])
    assert ended
    assert engine.capacity().free_rows == engine.limits.max_num_seqs
    assert engine.capacity().available_blocks == engine.limits.num_kv_blocks - 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_step_that_raises_is_run_again(
    saved: tuple[Path, Any], bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = saved
    engine = engine_of(directory)
    executor = engine._parts.executor
    launch, launched = type(executor).launch, []

    def failing(self: Any, plan: Any) -> Any:
        launched.append(plan)
        if len(launched) == bad + 1:
            raise RuntimeError("for the test")
        return launch(self, plan)

    monkeypatch.setattr(type(executor), "launch", failing)
    add(engine, "again", PROMPT, asking(LABELS))
    check(model, run(engine)["again"], PROMPT, LABELS, "product")


def test_logits_that_are_not_finite_fail_the_request_alone(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = saved
    engine = engine_of(directory)
    add(engine, "bad", PROMPT, asking(LABELS))
    update = engine._scheduler.update

    def spoilt(plan: Any, result: Any) -> Any:
        for values in result.reads.values():
            values[0][0] = math.nan
        return update(plan, result)

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "update", spoilt)
        outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.error_code for output in outputs] == ["output_invalid"]
    add(engine, "good", PROMPT, asking(LABELS))
    check(model, run(engine)["good"], PROMPT, LABELS, "product")


@pytest.mark.parametrize(
    ("labels", "options", "error"),
    [
        (["a" * 1100, "b"], {}, SchemaTooComplex),
        (["a" * 250, "b"], {}, PromptTooLong),
        (["a" * 60, "b"], {}, NeverFits),
        (["a", "b", "a"], {}, InvalidRequest),
        (["a", "b"], {"n": 2}, InvalidRequest),
        (["a", "b"], {"logit_bias": {1: 1.0}}, InvalidRequest),
        (["a", "b"], {"repetition_penalty": 1.1}, InvalidRequest),
        (["a", "b"], {"logprobs": 1}, InvalidRequest),
        (["a", "b"], {"kind": "sum"}, InvalidRequest),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_ones_are_refused(
    saved: tuple[Path, Any], labels: list[str], options: dict[str, Any], error: type[Exception]
) -> None:
    engine = engine_of(saved[0], num_kv_blocks=14)
    with pytest.raises(error):
        add(engine, "bad", PROMPT, asking(labels, **options))
    with pytest.raises(InvalidRequest, match="choice"):
        SamplingParams(label_probs="product")
    add(engine, "good", PROMPT, asking(["a", "b"]))
    assert len(run(engine)["good"].label_probs or ()) == 2


@pytest.fixture(scope="module")
def smollm2() -> tuple[LLM, Any]:
    from transformers import AutoModelForCausalLM

    directory = dense_smollm2()
    return LLM("smollm2", num_kv_blocks=400), AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    )


REAL = {
    "single tokens": [" positive", " negative", " neutral"],
    "case and space": ["Positive", "positive", " positive", " Positive", "POSITIVE"],
    "prefixes": [" sport", " sports", " sports news", " s"],
    "unicode": ["日本語", "日本", "español", "🙂", "🙃"],
    "many": [f" topic {number}" for number in range(8, 20)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REAL)
def test_the_real_model_agrees_with_transformers(smollm2: tuple[LLM, Any], name: str, kind: str) -> None:
    llm, model = smollm2
    tokenizer, labels = llm.engine.tokenizer, REAL[name]
    assert tokenizer is not None
    prompt = "Review: The film was long, and I loved every minute of it.\nThe label is:"
    (result,) = llm.generate(prompt, asking(labels, kind), use_tqdm=False)
    (output,) = result.outputs

    class AfterThePrompt:
        def encode(self, label: str) -> list[int]:
            whole = tokenizer.encode(prompt + label)
            assert whole[: len(result.prompt_token_ids)] == result.prompt_token_ids
            return whole[len(result.prompt_token_ids) :]

    assert tokenizer.eos_token_id is not None
    tokens = tokens_of(AfterThePrompt(), labels, tokenizer.eos_token_id)
    wanted = by_transformers(model, result.prompt_token_ids, tokens, kind)
    assert output.label_probs == pytest.approx(wanted, abs=1e-5)
    assert output.text == labels[max(range(len(labels)), key=wanted.__getitem__)]


@pytest.mark.parametrize("num_blocks", [22, 23, 24])
@pytest.mark.parametrize("num_running", [1, 2])
def test_one_that_is_preempted_while_its_last_step_runs_ends(
    saved: tuple[Path, Any], num_blocks: int, num_running: int
) -> None:
    engine = engine_of(
        saved[0], async_scheduling=True, block_size=1, num_kv_blocks=num_blocks, max_num_seqs=4,
        max_num_batched_tokens=64,
    )  # fmt: skip
    plain = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for number in range(num_running):
        engine.add_request(f"old{number}", [30 + number] * 2, plain, arrival=number)
    engine.step()
    ids, params = engine.input_processor.process(
        prompt_token_ids=list(range(40, 51)), params=asking(["ab", "bc", "cabb"])
    )
    engine.add_request("labels", ids, params, arrival=9)
    assert run(engine)["labels"].label_probs is not None


def test_a_label_after_thinking_is_refused(saved: tuple[Path, Any]) -> None:
    engine = engine_of(saved[0])
    token_ids, params = engine.input_processor.process(prompt=PROMPT, params=asking(["a", "b"]))
    with pytest.raises(UnsupportedFeature, match="enable_thinking"):
        engine.add_request("bad", token_ids, params, task=Generate(Outline(trigger="<call>")))
