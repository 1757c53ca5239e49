"""Requests with pictures: samples, scores, resumes, adapters of memory, and individual rejections and failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest, UnsupportedFeature
from pagemill.engine.execution import cuda_graphs
from pagemill.engine.execution.model_runner import ModelRunner
from pagemill.engine.layers.cuda_fusion import CudaFusion
from pagemill.engine.outputs import RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Score
from tests.engine.media.test_exactness import TEXT, Prompt, check, prompts
from tests.engine.media.tiny_vision import (
    PLACEHOLDER,
    add,
    expected,
    make_engine,
    picture,
    prompt_of,
    run,
    write,
)

KIND = "qwen3_vl"
PARTS: Prompt = [TEXT[:3], picture(KIND, 0), TEXT, picture(KIND, 1), TEXT[:2]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(KIND)
    return directory, write(KIND, directory)


def outputs(engine: Engine) -> list[RequestOutput]:
    found = []
    while engine.has_unfinished():
        found += engine.step()
        engine.check_integrity()
    return found


def log_probabilities(module: Any, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' log probabilities of each token's successors."""
    _, items = prompt_of(PARTS)
    ids = torch.tensor([token_ids])
    given = {
        name: torch.from_numpy(np.concatenate([one.inputs[name] for one in items]))
        for name in items[0].inputs
    }
    with torch.inference_mode():
        output = module(input_ids=ids, mm_token_type_ids=(ids == PLACEHOLDER).long(), **given)
    return output.logits[0].float().log_softmax(-1)


@pytest.mark.slow
def test_samples_resumes_and_evicted_blocks(model: tuple[Path, Any]) -> None:
    directory, module = model
    tokens, logprobs = reference = expected(module, PARTS)
    token_ids, items = prompt_of(PARTS)
    engine = make_engine(directory, num_kv_blocks=20, host_cache_gib=0.01, max_num_batched_tokens=7)
    engine.add_request("resumed", token_ids, GREEDY, media=items, resume=[SampleState(0, tokens[:5])])
    add(engine, "other", [TEXT * 3])
    add(engine, "again", PARTS)
    found = run(engine)
    assert found["resumed"][0] == tokens[5:]
    check({"again": found["again"]}, {"again": reference})
    assert engine.stats().scheduler.preemptions
    forked = make_engine(directory)
    add(forked, "forked", PARTS, n=3)
    samples: dict[int, list[int]] = {}
    for output in outputs(forked):
        for delta in output.deltas:
            samples.setdefault(delta.index, []).extend(delta.token_ids)
    assert samples == dict.fromkeys(range(3), tokens)
    assert forked.stats().media.encoded == 2
    searched = make_engine(directory)
    add(searched, "searched", PARTS, beam_width=1, logprobs=None)
    assert run(searched)["searched"][0] == tokens
    assert sum(logprobs) < 0


@pytest.mark.slow
def test_given_tokens_get_transformers_log_probabilities(model: tuple[Path, Any]) -> None:
    directory, module = model
    token_ids, items = prompt_of(PARTS)
    continuations = ((4, 9, 27), (4, 9), (30,))
    engine = make_engine(directory, max_num_batched_tokens=6)
    params = replace(GREEDY, n=3, max_tokens=3)
    engine.add_request("scores", token_ids, params, media=items, task=Score(continuations))
    engine.add_request("prompt", token_ids, replace(GREEDY, max_tokens=1, prompt_logprobs=0), media=items)
    scores: dict[int, list[float]] = {}
    prompt: list[Any] = []
    for output in outputs(engine):
        prompt = output.prompt_logprobs or prompt
        for delta in output.deltas if output.request_id == "scores" else ():
            scores.setdefault(delta.index, []).extend(one.logprob or 0.0 for one in delta.logprobs or ())
    for index, continuation in enumerate(continuations):
        table = log_probabilities(module, token_ids + list(continuation))
        wanted = [table[len(token_ids) - 1 + i, token].item() for i, token in enumerate(continuation)]
        assert scores[index] == pytest.approx(wanted, abs=1e-3)
    table = log_probabilities(module, token_ids)
    wanted = [table[place, token].item() for place, token in enumerate(token_ids[1:])]
    assert [one.logprob for one in prompt[1:]] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.slow
def test_a_batch_invariant_engine_computes_the_same_bits(model: tuple[Path, Any]) -> None:
    directory, _ = model
    found = []
    for tokens in (5, 64):
        engine = make_engine(directory, batch_invariant=True, max_num_batched_tokens=tokens)
        for number in range(2):
            add(engine, f"{number}", PARTS)
        found += run(engine).values()
    assert found == found[:1] * 4


def test_what_does_not_match_is_rejected_or_fails_alone(model: tuple[Path, Any]) -> None:
    directory, _ = model
    token_ids, items = prompt_of(PARTS)
    engine = make_engine(directory)
    for wrong in (
        items[:1],
        items[::-1],
        [replace(items[0], offset=items[0].offset + 1), items[1]],
        [replace(items[0], inputs={}), items[1]],
    ):
        with pytest.raises(InvalidRequest, match=r"^media: "):
            engine.add_request("wrong", token_ids, GREEDY, media=wrong)
    pixels = items[0].inputs["pixel_values"]
    broken = replace(items[0], digest=b"b" * 32, inputs=items[0].inputs | {"pixel_values": pixels[:, :5]})
    engine.add_request("broken", token_ids, GREEDY, media=[broken, items[1]])
    add(engine, "good", PARTS)
    add(engine, "aborted", [picture(KIND, 5)])
    assert engine.abort("aborted")[0].finished
    ends = {output.request_id: output for output in outputs(engine) if output.finished}
    assert ends.keys() == {"broken", "good"}
    assert (ends["broken"].error_code, ends["good"].error) == ("engine_error", None)
    assert "images" in (ends["broken"].error or "")
    with pytest.raises(UnsupportedFeature, match="media_cache_bytes is 0"):
        make_engine(directory, media_cache_bytes=0).add_request("any", token_ids, GREEDY, media=items)


def test_one_picture_is_encoded_once_and_the_cache_is_bounded(model: tuple[Path, Any]) -> None:
    directory, module = model
    rows = 6 * 64 * 4 * 3  # vectors of `picture(KIND, 0)`, for the prompt and two layers
    engine = make_engine(directory, media_cache_bytes=2 * rows, enable_prefix_caching=False)
    for question in range(10):
        add(engine, f"{question}", [picture(KIND, 0), [question]])
    run(engine)
    assert (engine.stats().media.encoded, engine.stats().media.cache_hits) == (1, 9)
    for number in range(3, 12, 3):
        add(engine, f"other {number}", [picture(KIND, number), [1]])
    run(engine)
    assert engine.stats().media.used_bytes == 2 * rows
    add(engine, "evicted", [picture(KIND, 0), [0]])
    run(engine)
    assert engine.stats().media.encoded == 5
    large: Prompt = [picture(KIND, 0), picture(KIND, 3), picture(KIND, 6), picture(KIND, 9)]
    add(engine, "larger than the cache", large)
    check(run(engine), {"larger than the cache": expected(module, large)})
    assert engine.stats().media.used_bytes <= 2 * rows
    add(engine, "text", [TEXT])
    run(engine)
    batch = cast("ModelRunner", engine._parts.executor)._batch
    assert [
        row for row in batch.rows if row is not None and row.media is not None
    ] == []  # pixels are not kept


def test_an_urgent_request_waits_for_one_that_is_half_encoded(model: tuple[Path, Any]) -> None:
    directory, module = model
    engine = make_engine(directory, media_cache_bytes=1, max_num_batched_tokens=4)  # one picture per step
    large: Prompt = [picture(KIND, 0), picture(KIND, 3), picture(KIND, 6)]
    add(engine, "low", large)
    engine.step()
    assert (engine.stats().media.encoded, engine.stats().media.waiting) == (1, 1)
    token_ids, items = prompt_of(PARTS)
    engine.add_request("high", token_ids, GREEDY, media=items, priority=-1)
    check(run(engine), {"low": expected(module, large), "high": expected(module, PARTS)})
    assert engine.stats().media.used_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "llava"])
def test_paths_of_cuda_change_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers, inputs in one copy, steps planned ahead, and graphs, which are replayed by their calls."""
    module = write(kind, tmp_path)
    replays: list[int] = []

    def capture(record: Any, _: Any) -> Any:
        return lambda: (replays.append(1), record())

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    monkeypatch.setattr(
        CpuBackend, "fusion", lambda _, traits, __, make_product: CudaFusion(traits, make_product)
    )
    engine = make_engine(tmp_path, stage_inputs=True, async_scheduling=True, max_num_batched_tokens=9)
    reference = {name: expected(module, parts) for name, parts in prompts(kind).items()}
    for name, parts in prompts(kind).items():
        add(engine, name, parts)
    check(run(engine), reference)
    assert len(replays) > 10
