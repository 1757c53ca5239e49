"""Number formats, drafts and windows over two processes: the same results as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.execution.parallel.test_tensor_parallel import GREEDY, PROMPTS, make_llm, save, tokens

pytestmark = pytest.mark.slow

IS_BF16_NATIVE = CpuBackend().module_dtype(torch.bfloat16) is torch.float32
COPIED = [[9, 3, 60, 33, 8, 21] * 5, *PROMPTS]
"""Prompts, one of which repeats itself: a draft follows."""


def scored(llm: LLM) -> torch.Tensor:
    """Log probabilities of the prompts' tokens."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, **GREEDY)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    entries = [entry for result in results for entry in result.prompt_logprobs or () if entry is not None]
    return torch.tensor([entry.logprob for entry in entries])


def both(directory: Path, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same values of one process and of two."""
    found = []
    for size in (1, 2):
        llm = make_llm(directory, tensor_parallel_size=size, **options)
        try:
            found.append(scored(llm))
        finally:
            llm.close()
    return found[0], found[1]


def test_int8_weights_split_at_whole_groups(tmp_path: Path) -> None:
    """A rank's groups of inputs are those of the complete model, so that sums differ only in their order. A
    sum between two integers may be rounded to the other one, so a few values differ by more."""
    directory = save("qwen3", tmp_path)  # half of its inputs are 32
    whole, split = both(directory, quantization="int8", dtype="float32")
    exact = scored(make_llm(directory, dtype="float32"))
    assert (whole - split).abs().median() < 1e-3
    assert (whole - split).abs().mean() < (whole - exact).abs().mean() / 4


@pytest.mark.skipif(not IS_BF16_NATIVE, reason="this CPU multiplies no bfloat16 numbers")
def test_bfloat16_weights(tmp_path: Path) -> None:
    """Ranks add their partial results in fp32."""
    directory = save("qwen3", tmp_path)
    whole, split = both(directory, dtype="bfloat16")
    exact = scored(make_llm(directory, dtype="float32"))
    assert (whole - exact).abs().mean() > 0
    assert (whole - split).abs().mean() < (whole - exact).abs().mean()


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_drafts_and_windows(name: str, tmp_path: Path) -> None:
    """In Gemma 2 every other layer has a window: two groups of blocks."""
    directory = save(name, tmp_path)
    params = SamplingParams(max_tokens=60, **GREEDY)
    plain = make_llm(directory, num_speculative_tokens=0, dtype="float32")
    expected = tokens(plain.generate(COPIED, params, use_tqdm=False))
    llm = make_llm(
        directory,
        tensor_parallel_size=2,
        dtype="float32",
        num_speculative_tokens=4,
        num_kv_blocks=96,
        max_num_batched_tokens=16,
    )
    try:
        assert tokens(llm.generate(COPIED, params, use_tqdm=False)) == expected
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in COPIED]
        assert tokens(alone) == expected
        assert llm.engine.stats().scheduler.drafted_tokens > 0
        llm.engine.check_integrity()
    finally:
        llm.close()
