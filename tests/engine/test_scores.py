"""The `Score` task: log-probabilities of given continuations equal transformers', for any schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest, NeverFits, PromptTooLong
from pagemill.engine.outputs import RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.test_labels import engine_of
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_gpt2, save_tiny_llama

PROMPT = [5, 17, 42, 9, 3, 60, 11, 2, 33, 8, 21, 5, 17, 4, 50, 13, 29, 31, 1, 6]
LABELS = [[7], [8, 9], [3], [10, 11, 12, 3, 3], [44] * 20, [8, 10]]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    save = {"llama": save_tiny_llama, "gpt2": save_tiny_gpt2}[request.param]
    return directory, save(directory)


def add(
    engine: Engine, name: str, prompt: list[int], labels: list[list[int]], top: int = 0, **options: Any
) -> None:
    params = SamplingParams(logprobs=top)
    token_ids, params, task = engine.input_processor.process_score(
        labels, prompt_token_ids=prompt, params=params
    )
    engine.add_request(name, token_ids, params, task=task, **options)


def run(engine: Engine, *, peek: Any = lambda: None) -> dict[str, list[RequestOutput]]:
    news: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            news.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        peek()
    return news


def scores(news: list[RequestOutput]) -> list[list[float]]:
    assert news[-1].error is None, news[-1].error
    found = {delta.index: delta for output in news for delta in output.deltas}
    assert all(delta.finish_reason == "stop" for delta in found.values())
    return [[e.logprob or 0.0 for e in found[index].logprobs or ()] for index in sorted(found)]


def expected(model: Any, prompt: list[int], labels: list[list[int]]) -> list[list[float]]:
    found = []
    for label in labels:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + label])).logits[0].float().log_softmax(-1)
        found.append([logits[len(prompt) + i - 1, token].item() for i, token in enumerate(label)])
    return found


def check(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(one) for one in found] == [len(one) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=5e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 9},
        {"max_num_seqs": 2},
        {"num_kv_blocks": 13, "max_num_batched_tokens": 64},
        {"num_kv_blocks": 13, "host_cache_gib": 0.001, "async_scheduling": True},
        {"pad_to_bucket": True, "stage_inputs": True},
    ],
    ids=str,
)
def test_scores_are_transformers(saved: tuple[Path, Any], settings: dict[str, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory, **settings)
    draw = random.Random(1)
    asked = {"all": (PROMPT, LABELS), "itself": (PROMPT[:1], [PROMPT[1:]])}
    for number in range(6):
        prompt = [*PROMPT[: draw.randrange(1, 20)], draw.randrange(VOCAB_SIZE)]
        asked[str(number)] = prompt, draw.sample(LABELS, 3)
    for name, (prompt, labels) in asked.items():
        add(engine, name, prompt, labels)
    engine.add_request("beside", PROMPT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    news = run(engine)
    for name, (prompt, labels) in asked.items():
        check(scores(news[name]), expected(model, prompt, labels))
    assert sum(len(delta.token_ids) for output in news["beside"] for delta in output.deltas) == 12
    assert engine.stats().requests.generated_tokens == 12
    assert engine.capacity().free_rows == engine.limits.max_num_seqs


def test_a_context_is_computed_once_for_all_its_continuations(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory)
    labels = [[token] for token in range(20, 40)]
    add(engine, "labels", PROMPT, labels)
    news = run(engine)["labels"]
    check(scores(news), expected(model, PROMPT, labels))
    # 20 tokens are 5 blocks of 4; the last one is separate for each.
    assert engine.stats().steps.computed_tokens == len(PROMPT) + 4 * (len(labels) - 1)
    assert engine.stats().requests.generated_tokens == 0
    assert news[-1].usage is not None
    assert (news[-1].usage.prompt_tokens, news[-1].usage.completion_tokens) == (len(PROMPT) + len(labels), 0)


def test_alternatives_come_with_each_position(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory)
    add(engine, "top", PROMPT, [[8, 9]], top=3)
    (delta,) = [delta for output in run(engine)["top"] for delta in output.deltas]
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, 8, 9]])).logits[0].float().log_softmax(-1)
    for position, entry in enumerate(delta.logprobs or ()):
        values, tokens = logits[len(PROMPT) + position - 1].topk(3)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), rel=1e-5, abs=5e-5)


def test_what_was_scored_before_is_not_scored_again(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    engine = engine_of(directory)
    done = [SampleState(0, LABELS[0], "stop"), SampleState(1, [], None), SampleState(2, LABELS[2], "stop")]
    add(engine, "resumed", PROMPT, LABELS[:3], resume=done)
    news = run(engine)["resumed"]
    assert [delta.index for output in news for delta in output.deltas] == [1]
    check(scores(news), expected(model, PROMPT, LABELS[1:2]))


def test_one_can_be_aborted(saved: tuple[Path, Any]) -> None:
    engine = engine_of(saved[0], max_num_batched_tokens=5)
    add(engine, "gone", PROMPT, LABELS)
    engine.step()
    (output,) = engine.abort("gone")
    assert output.finished
    engine.check_integrity()
    assert not run(engine)
    assert engine.capacity().available_blocks == 63


@pytest.mark.parametrize(
    ("prompt", "labels", "error"),
    [
        ([5], [], InvalidRequest),
        ([], [[5]], InvalidRequest),
        ([5], [[]], InvalidRequest),
        ([5], [[VOCAB_SIZE]], InvalidRequest),
        ([5], [[-1]], InvalidRequest),
        ([VOCAB_SIZE], [[1]], InvalidRequest),
        ([5] * 60, [[5] * 80], PromptTooLong),
        ([5], [[5]] * 129, InvalidRequest),
        ([5] * 20, [[5] * 40], NeverFits),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_ones_are_refused(
    saved: tuple[Path, Any], prompt: list[int], labels: list[list[int]], error: type[Exception]
) -> None:
    engine = engine_of(saved[0], max_model_len=128, num_kv_blocks=13)
    with pytest.raises(error):
        add(engine, "bad", prompt, labels)
    add(engine, "good", PROMPT, LABELS[:1])
    assert len(scores(run(engine)["good"])) == 1
