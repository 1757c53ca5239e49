"""Models that keep a state per sequence: for any schedule, the values are transformers'."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.config import MAX_CACHED_STATES, EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ConfigError, ModelLoadError
from pagemill.engine.llm import LLM, GenerationOutput
from pagemill.engine.sampling_params import BeamSearchParams, SamplingParams
from pagemill.engine.text.tokenizer import ByteTokenizer
from pagemill.kernels import dispatch
from pagemill.monitoring.metrics.kv_cache import accounting_errors
from tests.engine.models.families.tiny import PROMPTS
from tests.engine.models.generic.tiny_configs import tiny_config
from tests.engine.models.generic.trial import build, randomise

KINDS = ("lfm2", "mamba", "mamba2", "qwen3_5_text")
"""Convolutions; a scan of channels, one of heads, both without attention; one whose heads share keys."""
STEPS: dict[str, Any] = {
    "num_threads": 1, "num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 6,
    "verify": False,
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    directory: Path
    module: Any

    def llm(self, **options: Any) -> LLM:
        return LLM(str(self.directory), **(STEPS | options))

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Return transformers' log probabilities of the output, computed in one pass."""
        logits = self.module(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
        predicting = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        return predicting[torch.arange(len(output)), output]

    def check(self, results: list[GenerationOutput]) -> None:
        for result in results:
            assert result.error is None
            for output in result.outputs:
                found = torch.tensor([entry.logprob for entry in output.logprobs or ()])
                wanted = self.logprobs(result.prompt_token_ids, output.token_ids)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def save(model_type: str, directory: Path, **fields: Any) -> Saved:
    module = build(model_type, tiny_config(model_type, 0) | fields)
    randomise(module, 3)
    module.save_pretrained(directory)
    return Saved(directory, module)


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["mamba", "mamba2", "qwen3_5_text"], indirect=True)
def test_kernels_advance_states_in_their_slots(saved: Saved) -> None:
    """Every recurrent layer of these types runs on the kernels, and none on transformers' functions."""
    calls: list[str] = []

    def observer(name: str, operator: Any, plain: Any, args: Any, kwargs: Any) -> Any:
        calls.append(name)
        return operator(*args, **kwargs)

    llm = saved.llm(async_scheduling=False)
    calls.clear()
    with dispatch.observed(observer):
        [result] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    kernel = "state_space_scan" if "mamba" in saved.directory.name else "gated_delta_rule"
    layers = [kind for kind in saved.module.config.layer_types if kind == "linear_attention"]
    chunks = -(-len(result.prompt_token_ids) // STEPS["max_num_batched_tokens"])
    assert calls.count(kernel) == len(layers) * (chunks + 1)


@pytest.mark.parametrize("overlapped", [False, True])
def test_samples_fork_off_one_prompt(saved: Saved, overlapped: bool) -> None:
    llm = saved.llm(async_scheduling=overlapped)
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=6, logprobs=0, ignore_eos=True)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    saved.check(results)
    assert any(len({tuple(output.token_ids) for output in result.outputs}) > 1 for result in results)
    llm.engine.check_integrity()


def test_samples_are_preempted_and_computed_again(saved: Saved) -> None:
    llm = saved.llm(num_kv_blocks=14, max_num_batched_tokens=16)
    params = SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=12, logprobs=0, ignore_eos=True)
    saved.check(llm.generate(PROMPTS, params, use_tqdm=False))
    assert llm.engine.stats().scheduler.preemptions > 0


def test_beams_are_scored_as_by_transformers(saved: Saved) -> None:
    results = saved.llm().beam_search(
        PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True), use_tqdm=False
    )
    for result in results:
        assert len(result.outputs) == 3
        for output in result.outputs:
            wanted = float(saved.logprobs(result.prompt_token_ids, output.token_ids).sum())
            assert output.cumulative_logprob == pytest.approx(wanted, abs=1e-2)


def test_given_tokens_are_scored_as_by_transformers(saved: Saved) -> None:
    engine, prompt = saved.llm().engine, PROMPTS[-1]
    labels = [[7], [8, 9], [3, 11, 12, 3], [8, 10]]
    tokens, params, task = engine.input_processor.process_score(
        labels, prompt_token_ids=prompt, params=SamplingParams(logprobs=0)
    )
    engine.add_request("scores", tokens, params, task=task)
    found: dict[int, list[float]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            for delta in output.deltas:
                found.setdefault(delta.index, []).extend(e.logprob or 0.0 for e in delta.logprobs or ())
    for index, label in enumerate(labels):
        wanted = saved.logprobs(prompt, label)
        torch.testing.assert_close(torch.tensor(found[index]), wanted, rtol=1e-3, atol=1e-3)


def test_logprobs_of_the_prompt(saved: Saved) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for result in saved.llm().generate(PROMPTS, params, use_tqdm=False):
        prompt = result.prompt_token_ids
        found = torch.tensor([entry.logprob for entry in (result.prompt_logprobs or ())[1:] if entry])
        torch.testing.assert_close(found, saved.logprobs(prompt[:1], prompt[1:]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"pad_to_bucket": True}, {"stage_inputs": True}], ids=str)
def test_padded_and_staged_steps(saved: Saved, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    saved.check(saved.llm(**options).generate(PROMPTS, params, use_tqdm=False))


def test_int8_products_stay_close(saved: Saved) -> None:
    """The comparison with transformers at startup passes."""
    saved.llm(quantization="int8", verify=True)


def test_slots_are_counted(saved: Saved) -> None:
    llm = saved.llm()
    engine = llm.engine
    idle = engine.stats().kv
    assert (idle.state_slots, idle.active_state_slots, idle.cached_state_slots) == (
        6 + MAX_CACHED_STATES,
        0,
        0,
    )
    assert idle.state_bytes > 0
    for number, prompt in enumerate(PROMPTS[:2]):
        tokens, params = engine.input_processor.process(
            prompt_token_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        )
        engine.add_request(str(number), tokens, params)
    seen = set()
    while engine.has_unfinished():
        engine.step()
        kv = engine.stats().kv
        assert accounting_errors(kv) == []
        seen.add(kv.active_state_slots)
    assert 2 in seen
    assert engine.stats().kv.active_state_slots == 0


@pytest.mark.slow
def test_prefixes_begin_with_a_cached_state(saved: Saved) -> None:
    """Tokens and log probabilities equal those without it: also with eviction, preemption and label trees."""
    shared, rng = PROMPTS[-1][:13], random.Random(1)
    prompts = [
        shared[: rng.choice([5, 13])] + [rng.randrange(97) for _ in range(rng.randint(1, 9))]
        for _ in range(12)
    ]
    prompts += prompts[:3]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    wanted = saved.llm(enable_prefix_caching=False).generate(prompts, params, use_tqdm=False)
    size = saved.llm().engine.stats().kv.state_bytes
    for options in ({}, {"state_cache_bytes": 3 * size, "num_kv_blocks": 24}, {"async_scheduling": True}):
        llm = saved.llm(**({"max_num_batched_tokens": 32} | options))
        found = llm.generate(prompts, params, use_tqdm=False)
        saved.check(found)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in wanted]
        stats = llm.engine.stats()
        assert stats.kv.prefix_hit_tokens > 60
        assert stats.scheduler.preemptions == 0 or options
        assert stats.kv.cached_state_slots == 3 or "state_cache_bytes" not in options
        llm.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_structure_that_was_asked_for(kind: str, tmp_path: Path) -> None:
    """The state after sampled and forced tokens is transformers'."""
    tokenizer = ByteTokenizer()
    saved = save(kind, tmp_path, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    pattern = r"(yes, because|no, though) [a-f]{3,9}\."
    params = SamplingParams(
        temperature=0.0, max_tokens=40, logprobs=0, structured_outputs=StructuredOutputs(regex=pattern)
    )
    prompts = [f"Is this a question? {text}" for text in ("Really?", "No.", "Why?", "Perhaps")]
    llm = saved.llm(max_num_batched_tokens=64)
    for result in llm.generate(prompts, params, use_tqdm=False):
        (output,) = result.outputs
        assert re.fullmatch(pattern, output.text), output.text
        wanted = saved.logprobs(result.prompt_token_ids, output.token_ids).tolist()
        found = [entry.logprob for entry in output.logprobs or ()]
        assert None in found, "some were forced"
        assert found == [
            pytest.approx(w, abs=1e-3) if f is not None else None for f, w in zip(found, wanted, strict=True)
        ]
    assert llm.engine.stats().kv.prefix_hit_tokens > 0


@pytest.mark.slow
def test_memory_limits_the_sequences_and_cached_states(tmp_path: Path) -> None:
    saved = save("qwen3_5_text", tmp_path)
    size = saved.llm().engine.stats().kv.state_bytes

    def slots(num_states: int, **options: Any) -> tuple[int, int]:
        memory = num_states * size
        config = EngineConfig(
            model=str(tmp_path), num_threads=1, verify=False, kv_cache_memory_bytes=memory, **options
        )
        engine = Engine.from_config(config)
        kv, rows = engine.stats().kv, engine.capacity().free_rows
        assert kv.state_slots * size + kv.capacity_blocks * kv.block_bytes <= memory
        return rows, kv.state_slots - rows

    assert slots(20) == (9, 2)
    assert slots(20, max_num_seqs=12) == (12, 2)
    assert slots(20, state_cache_bytes=5 * size) == (7, 5)
    assert slots(20, state_cache_bytes=14 * size) == (3, 14)
    assert slots(20, enable_prefix_caching=False) == slots(20, state_cache_bytes=0) == (10, 0)
    assert slots(10_000) == (64, MAX_CACHED_STATES)
    for options in ({"max_num_seqs": 4}, {"state_cache_bytes": 4 * size}):
        with pytest.raises(
            ConfigError, match=rf"hold the states of 3 sequences, of {size} bytes each"
        ) as refused:
            slots(3, **options)
        assert refused.value.setting == "max_num_seqs"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("host_cache_gib", 0.1),
        ("num_speculative_tokens", 4),
        ("batch_invariant", True),
        ("tensor_parallel_size", 2),
    ],
)
def test_settings_that_need_an_earlier_state_are_refused(setting: str, value: Any, tmp_path: Path) -> None:
    saved = save("lfm2", tmp_path)
    with pytest.raises(ConfigError, match=f"{setting}={value!r} is not supported") as refused:
        saved.llm(**{setting: value})
    assert refused.value.setting == setting


def test_broken_checkpoints_name_the_field_or_the_tensor(tmp_path: Path) -> None:
    saved = save("lfm2", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for field, value, message in (
        ("conv_L_cache", 5, r"model\.layers\.0\.conv\.conv\.weight has shape"),
        ("layer_types", ["full_attention", "conv"], r"tensors .*model\.layers\."),
        ("layer_types", ["conv", "spiral"], "layer_types|spiral"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | {field: value}))
        with pytest.raises(ModelLoadError, match=message):
            saved.llm()


@pytest.mark.slow
def test_a_model_without_attention_has_no_limit_of_blocks(tmp_path: Path) -> None:
    saved = save("mamba", tmp_path)
    llm = LLM(str(tmp_path), num_threads=1, max_model_len=400, max_num_seqs=3, block_size=16, verify=False)
    assert llm.engine.stats().kv.capacity_blocks == 1 + 3 * 25
    params = SamplingParams(temperature=0.0, max_tokens=300, logprobs=0, ignore_eos=True)
    saved.check(llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False))
