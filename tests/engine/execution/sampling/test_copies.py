"""The host's costs for a step of many rows: copies and operators that do not grow with the rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.sampling.sampler import Sampler, StagedSamples
from pagemill.engine.execution.staging import StagedTransfer
from pagemill.engine.plan import NewRow, Sample, StepResult
from pagemill.engine.sampling_params import SamplingParams

VOCAB_SIZE = 1000
EOS = (2,)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "choice": ({"temperature": 0.0}, {"allowed_token_ids": [5, 6, 900]}, ()),
    "json": ({"temperature": 0.0}, {"token_mask": bytes([0b10110101] * (VOCAB_SIZE // 8))}, ()),
    "bias": ({"temperature": 0.7, "logit_bias": {3: 4.0, 700: -2.0}}, {}, ()),
    "penalties": ({"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3}, {}, ()),
    "bad words": ({"temperature": 0.0}, {}, ((7,), (8, 9), (1, 10))),
    "too short": ({"temperature": 0.9, "min_tokens": 60, "max_tokens": 90}, {}, ()),
    "logprobs": ({"temperature": 0.0, "logprobs": 2}, {}, ()),
    "filters": ({"temperature": 0.8, "top_p": 0.9, "top_k": 40}, {}, ()),
    "plain": ({"temperature": 0.0}, {}, ()),
}


def make_work(kinds: list[str]) -> list[SampleWork]:
    work = []
    for row, kind in enumerate(kinds):
        params, sample, bad_words = KINDS[kind]
        new = NewRow(row, str(row), 0, [1] * 20, 20, [1], SamplingParams(**params), 7 + row, bad_words)
        work.append(SampleWork(Sample(row, row, 50, **sample), new))
    return work


class Operators(TorchDispatchMode):
    """Counts launches, and tensors made of the host's values: each is a copy from pageable memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.from_host: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        crosses = "_to_copy" in str(operator) and (kwargs or {}).get("device") is not None
        if crosses or "lift_fresh" in str(operator):
            self.from_host[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def run(kinds: list[str], logits: torch.Tensor) -> tuple[StepResult, Operators, int]:
    work = make_work(kinds)
    generator = torch.Generator().manual_seed(3)
    table = torch.randint(VOCAB_SIZE, (len(kinds), 64), generator=generator)
    sampler, transfer = Sampler(EOS, draws_on_device=True), StagedTransfer(CpuBackend(), 2**20)
    staged: StagedSamples = sampler.stage(work, VOCAB_SIZE, transfer)
    transfer.send()
    with Operators() as operators:
        output = sampler.sample(logits.clone(), work, table, staged)
    output.fill(result := StepResult(0, []), iter(output.tensors()))
    return result, operators, transfer.num_copies


@pytest.fixture(autouse=True)
def device_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference operator creates tensors; the kernel does not."""

    def draw(logits: torch.Tensor, peaks: torch.Tensor, draws: Any) -> torch.Tensor:
        return logits[draws.index].argmax(dim=-1)

    monkeypatch.setattr("pagemill.engine.execution.sampling.sampler.draw", draw)


@pytest.mark.parametrize("kind", [*KINDS, "mix"])
def test_256_rows_take_one_copy_and_as_many_operators_as_16(kind: str) -> None:
    def kinds(count: int) -> list[str]:
        return [kind] * count if kind != "mix" else (list(KINDS) * count)[:count]

    logits = torch.randn(256, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    _, few, _ = run(kinds(18), logits[:18])
    _, many, copies = run(kinds(256), logits)
    assert not many.from_host, f"copied from pageable memory: {many.from_host}"
    assert copies <= 2
    assert many.count == few.count


def test_a_row_in_a_mix_is_what_it_is_alone() -> None:
    kinds = (list(KINDS) * 8)[:64]
    logits = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 3
    together, _, _ = run(kinds, logits)
    work, sampler = make_work(kinds), Sampler(EOS, draws_on_device=True)
    generator = torch.Generator().manual_seed(3)
    table = torch.randint(VOCAB_SIZE, (64, 64), generator=generator)
    changed: npt.NDArray[Any] = np.zeros(64, dtype=bool)
    for number, item in enumerate(work):
        alone = SampleWork(
            Sample(item.sample.row, 0, item.sample.position, item.sample.allowed_token_ids), item.row
        )
        alone.sample.token_mask = item.sample.token_mask
        output = sampler.sample(logits[number : number + 1].clone(), [alone], table)
        output.fill(result := StepResult(0, []), iter(output.tensors()))
        assert result.token_ids[0] == together.token_ids[number]
        assert result.logprobs.get(0) == together.logprobs.get(number)
        changed[number] = result.token_ids[0] != [int(logits[number].argmax())]
    assert changed.sum() > 8, "the parameters did something"
