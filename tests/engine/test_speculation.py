"""Drafts do not change outputs: tokens, texts, ends and log-probabilities equal those of an engine without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.speculation.step_cost import StepCost

TEXT = """Name: Ada Berg. Street: Havnegata 12. Town: Bergen. Mail: ada@berg.example. She orders 3 lamps, 2 ropes and
40 metres of chain, to be sent to Havnegata 12 in Bergen before the 14th of March. The lamps are green."""
TASKS = [
    "Repeat this text:",
    "Correct the spelling of this text:",
    "List the name, the street and the town in it:",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=60),
    "penalised": SamplingParams(temperature=0.0, max_tokens=60, repetition_penalty=1.05, frequency_penalty=0.1),
    "stopped by a text": SamplingParams(temperature=0.0, max_tokens=60, stop=("Bergen", ". She"), logprobs=1),
    "stopped, with the text": SamplingParams(
        temperature=0.0, max_tokens=60, stop=(" Berg",), include_stop_str_in_output=True, min_tokens=20
    ),
    "barred": SamplingParams(temperature=0.0, max_tokens=60, bad_words=("lamps", " Bergen"), logit_bias={28: -2.0}),
    "endless": SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=2),
}  # fmt: skip


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost nothing: every one is made, regardless of other load on the machine."""
    monkeypatch.setattr(StepCost, "slope", property(lambda _: 0.0))


@dataclass(frozen=True)
class Pair:
    """The same engine without drafts and with them."""

    plain: LLM
    drafting: LLM

    @classmethod
    def of(cls, **settings: Any) -> Pair:
        settings = {"model": "smollm2", "num_kv_blocks": 256, "max_num_seqs": 32, "num_threads": 1} | settings
        return cls(LLM(**settings, num_speculative_tokens=0), LLM(**settings, num_speculative_tokens=8))

    def check(self, params: SamplingParams, copies: int = 1) -> None:
        chats = [[{"role": "user", "content": f"{task}\n{TEXT}"}] for task in TASKS * copies]
        plain = self.plain.chat(chats, params, use_tqdm=False)
        before = self.drafting.engine.stats().scheduler
        drafted = self.drafting.chat(chats, params, use_tqdm=False)
        after = self.drafting.engine.stats().scheduler
        assert [told(output) for output in drafted] == [told(output) for output in plain]
        assert logprobs(drafted) == pytest.approx(logprobs(plain), abs=1e-4)
        assert before.accepted_tokens < after.accepted_tokens <= after.drafted_tokens
        self.drafting.engine.check_integrity()
        stats = self.drafting.engine.stats().kv
        assert stats.active_blocks == stats.filled_slots == 0


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [
        (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) for sample in output.outputs
    ] + [(output.usage.completion_tokens,)]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    samples = [sample for output in outputs for sample in output.outputs]
    return [entry.logprob or 0.0 for sample in samples for entry in sample.logprobs or ()]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair.of()
    yield pair
    del pair


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_no_output(pair: Pair, name: str) -> None:
    pair.check(PARAMS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_blocks": 20, "enable_prefix_caching": False},
        {"num_kv_blocks": 20, "host_cache_gib": 0.1, "max_num_batched_tokens": 24},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ],
    ids=["short of blocks", "host tier", "int8"],
)
def test_drafts_change_no_output_of(settings: dict[str, Any]) -> None:
    Pair.of(**settings).check(PARAMS["greedy"], copies=2)


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
def test_bits_are_those_of_a_decode() -> None:
    pair = Pair.of(batch_invariant=True)
    params = replace(PARAMS["greedy"], logprobs=0, max_tokens=40)
    pair.check(params)
    chat = [{"role": "user", "content": f"{TASKS[0]}\n{TEXT}"}]
    plain, drafted = (logprobs(llm.chat(chat, params, use_tqdm=False)) for llm in (pair.plain, pair.drafting))
    assert plain == drafted


@pytest.mark.slow
def test_a_step_that_is_planned_ahead_has_no_drafts() -> None:
    with pytest.raises(ConfigError, match="async_scheduling"):
        LLM("smollm2", num_speculative_tokens=4, async_scheduling=True)
    assert EngineConfig(model="smollm2", async_scheduling=True).num_speculative_tokens is None
    llm = LLM("smollm2", async_scheduling=True, num_kv_blocks=64, num_threads=1)
    assert llm.engine.limits.num_speculative_tokens == 0
