"""`prompt_logprobs`: log-probabilities of the prompt's own tokens, for every way to compute the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.execution import prompt_scorer
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import RequestOutput, SampleState
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.native_cases import NATIVE_CASES, write_llama
from tests.engine.models.families.tiny import VOCAB_SIZE

PROMPT = [(11 * i + 5) % VOCAB_SIZE for i in range(37)]
NUM_TOP = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    """Log probabilities [num_tokens, vocab_size] from one forward pass of transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs


def check(
    entries: list[TokenLogprobs | None] | None, expected: torch.Tensor, prompt: list[int] = PROMPT
) -> None:
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        reference = expected[position - 1]
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(reference[entry.token_id]), abs=1e-4)
        best = reference.topk(NUM_TOP)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(str(checkpoint), **({"num_kv_blocks": 64, "block_size": 4, "num_threads": 1} | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 7, "async_scheduling": True, "pad_to_bucket": True},
        {"long_prefill_token_threshold": 1, "enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 3])
def test_they_are_those_of_one_forward_pass(
    checkpoint: Path, expected: torch.Tensor, options: dict[str, Any], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scorer, "_SLICE", 4)
    llm = make_llm(checkpoint, **options)
    asking = SamplingParams(n=n, max_tokens=3, seed=1, prompt_logprobs=NUM_TOP)
    plain = SamplingParams(n=n, max_tokens=3, seed=1)
    other = [7, 8, 9] * 4
    # Together with requests without the option, and again after they have filled the prefix cache.
    for _ in range(2):
        results = llm.generate([PROMPT, other, PROMPT], [plain, plain, asking], use_tqdm=False)
        assert [result.prompt_logprobs is None for result in results] == [True, True, False]
        check(results[2].prompt_logprobs, expected)
        assert [o.token_ids for o in results[2].outputs] == [o.token_ids for o in results[0].outputs]
        assert results[2].usage.cached_tokens == 0, "a prefix hit has no logits"
    llm.engine.check_integrity()


def test_they_survive_preemption(checkpoint: Path, expected: torch.Tensor) -> None:
    llm = make_llm(checkpoint, num_kv_blocks=26, max_num_batched_tokens=16)
    # With different lengths: equal requests would run once.
    asking = [
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_TOP)
        for count in (20, 21, 22)
    ]
    for result in llm.generate([PROMPT] * 3, asking, use_tqdm=False):
        check(result.prompt_logprobs, expected)
    assert llm.engine.stats().scheduler.preemptions > 0


def test_a_resumed_request_tells_them_again(checkpoint: Path, expected: torch.Tensor) -> None:
    engine = Engine.from_config(
        EngineConfig(model=str(checkpoint), num_kv_blocks=64, block_size=4, num_threads=1)
    )
    params = SamplingParams(n=2, max_tokens=6, seed=1, prompt_logprobs=NUM_TOP, ignore_eos=True)
    done, begun = SampleState(0, [1, 2, 3, 4, 5, 6], finish_reason="length"), SampleState(1, [4, 5])
    engine.add_request("r", PROMPT, params, resume=[done, begun])
    last: RequestOutput | None = None
    while engine.has_unfinished():
        for output in engine.step():
            assert (output.prompt_logprobs is None) == (not output.finished)
            last = output
    assert last is not None
    check(last.prompt_logprobs, expected)


def test_one_token_has_nothing_before_it(checkpoint: Path) -> None:
    (result,) = make_llm(checkpoint).generate(
        [[5]], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False
    )
    assert result.prompt_logprobs == [None]


def test_zero_gives_the_prompt_s_tokens_alone(checkpoint: Path, expected: torch.Tensor) -> None:
    (result,) = make_llm(checkpoint).generate(
        [PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    entries = result.prompt_logprobs
    assert entries is not None
    assert entries[1] is not None
    assert entries[1].logprob == pytest.approx(float(expected[0][PROMPT[1]]), abs=1e-4)
    assert {len(entry.top) for entry in entries if entry is not None} == {0}


@pytest.mark.parametrize("name", sorted(NATIVE_CASES))
def test_every_family_s_head_can_be_run_alone(name: str, tmp_path: Path) -> None:
    """Softcaps, scales and similar operations come after the matmul: an omission would show here."""
    case = NATIVE_CASES[name]()
    prompt = PROMPT[:9]
    llm = LLM(
        str(case.write(tmp_path / "model")),
        **({"num_kv_blocks": 32, "block_size": 4, "num_threads": 1, "dtype": "float32"} | case.options),
    )
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=NUM_TOP), use_tqdm=False)
    rows = [case.logits(prompt[:end]).log_softmax(-1) for end in range(1, len(prompt))]
    check(result.prompt_logprobs, torch.stack(rows), prompt)
