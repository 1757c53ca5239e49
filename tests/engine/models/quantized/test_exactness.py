"""A quantized checkpoint computes with its represented values, bit for bit like a plain fp32 checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pagemill.engine.devices import cpu
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.cpu.matmul import fp32
from tests.engine.models.quantized.checkpoints import FORMATS, write_pair

PROMPTS = [[5, 9, 1, 44, 17, 2], [8, 8, 30], list(range(10, 50))]
REORDERED = "inputs reordered"


def answers(directory: Path, **options: Any) -> list[Any]:
    """Return tokens and their log probabilities."""
    llm = LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=64, num_threads=1, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True)
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_as_the_plain_numbers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    form, kept_as = FORMATS[name]
    stored, plain = write_pair(tmp_path, form)
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        found = answers(stored)
    if fp32.is_supported():
        assert any(f"quantized weights: 8 linear layers as {kept_as}" in line for line in caplog.messages)
    expected = answers(plain)
    if REORDERED not in kept_as:
        assert found == expected
        return
    for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(found, expected, strict=True):
        assert tokens == plain_tokens
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in plain_logprobs], abs=1e-5
        )


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "fp8-blocks"])
def test_as_transformers_computes_it(name: str, tmp_path: Path) -> None:
    """An independent check of the complete model, with the values that the format represents."""
    stored, plain = write_pair(tmp_path, FORMATS[name][0])
    model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for prompt, (tokens, logprobs) in zip(PROMPTS, answers(stored), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
        assert [one.logprob for one in logprobs] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_widens_without_our_kernels(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_has_own_products", lambda: False)
    stored, plain = write_pair(tmp_path, FORMATS["gptq"][0])
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        assert answers(stored, dtype=dtype) == answers(plain, dtype=dtype)
    assert any(f"linear layers as widened to {dtype}" in line for line in caplog.messages)


@pytest.mark.slow
def test_float16_keeps_the_file_s_integers_with_our_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not cpu._has_own_products():
        pytest.skip("this CPU has neither AVX2 nor AVX-512")
    stored, _ = write_pair(tmp_path, FORMATS["gptq"][0])
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        answers(stored, dtype="float16")
    assert any("linear layers as 4-bit integers, lossless" in line for line in caplog.messages), (
        caplog.messages
    )


def test_int8_on_top_is_int8_of_the_plain_numbers(tmp_path: Path) -> None:
    stored, plain = write_pair(tmp_path, FORMATS["w4a16"][0])
    assert answers(stored, quantization="int8") == answers(plain, quantization="int8")


def test_batch_invariance_holds(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, FORMATS["fp8-blocks"][0])
    together = answers(stored, batch_invariant=True)
    assert answers(stored, batch_invariant=True, max_num_seqs=1) == together
