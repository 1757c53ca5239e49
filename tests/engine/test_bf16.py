"""`dtype=bfloat16` on a CPU: the choice of `auto`, and the distance of its results from fp32's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.dense import dense_smollm2
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import cpu
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.llm import LLM
from pagemill.engine.models.loader import resolve_dtype
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.test_greedy_exactness import TEXT
from tests.engine.tiny_model import save_tiny_llama

bf16 = pytest.importorskip("pagemill.kernels.cpu.matmul.bf16")
needs_native = pytest.mark.skipif(not bf16.is_native(), reason="needs a CPU with AVX-512 BF16")

SMALL: dict[str, Any] = {"num_kv_blocks": 64, "num_threads": 1, "skip_tokenizer_init": True}


@pytest.mark.parametrize("declared", [torch.bfloat16, torch.float32, torch.float16, None])
@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("is_stored_quantized", [False, True])
def test_auto_follows_the_cpu_and_the_checkpoint(
    declared: torch.dtype | None,
    multiplies: bool,
    quantization: Any,
    is_stored_quantized: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_has_bf16_products", lambda: multiplies)
    config = EngineConfig(model="smollm2", quantization=quantization)
    dtype = resolve_dtype(
        config, SimpleNamespace(dtype=declared), CpuBackend(), is_quantized=is_stored_quantized
    )
    is_plain = quantization is None and not is_stored_quantized
    assert dtype is (
        torch.bfloat16 if declared is torch.bfloat16 and multiplies and is_plain else torch.float32
    )
    for name in ("float32", "bfloat16", "float16"):
        explicit = EngineConfig(model="smollm2", dtype=name)
        assert resolve_dtype(explicit, SimpleNamespace(dtype=declared), CpuBackend()) is getattr(torch, name)


@pytest.mark.slow
def test_the_fingerprint_names_what_was_chosen(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)

    def loaded(dtype: Any) -> tuple[str, str]:
        stats = LLM(str(tmp_path), dtype=dtype, **SMALL).engine.stats()
        return stats.loaded.fingerprint, stats.loaded.tier

    chosen = loaded("auto")
    assert chosen == loaded("auto")
    assert chosen == loaded("bfloat16" if bf16.is_native() else "float32")
    assert loaded("float32") != loaded("bfloat16")
    assert (loaded("float32")[1], loaded("bfloat16")[1]) == ("token", "continues")


@dataclass(frozen=True)
class Scores:
    """For every token of a text except the first: its log probability, and the model's own choice instead of it."""

    logprobs: torch.Tensor
    choices: torch.Tensor

    def perplexity(self) -> float:
        return float(self.logprobs.double().mean().neg().exp())

    def agreement(self, other: Scores) -> float:
        return float((self.choices == other.choices).double().mean())


def transformers_scores(ids: list[int], dtype: torch.dtype) -> Scores:
    model = AutoModelForCausalLM.from_pretrained(dense_smollm2(), dtype=dtype).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return Scores(
        logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])], logits.argmax(-1)
    )


def own_scores(ids: list[int], llm: LLM) -> Scores:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    entries = [entry for entry in llm.generate([ids], params)[0].prompt_logprobs or [] if entry is not None]
    scored = [entry for entry in entries if entry.logprob is not None]
    return Scores(
        torch.tensor([entry.logprob for entry in scored]), torch.tensor([entry.top[0][0] for entry in scored])
    )


@pytest.mark.slow
@needs_native
def test_as_near_to_fp32_as_transformers_is_in_bfloat16() -> None:
    """Sums, activations between matmuls, softmax and norms are fp32 here; there each result is rounded."""
    torch.set_num_threads(1)
    ids = AutoTokenizer.from_pretrained(dense_smollm2())(TEXT)["input_ids"]
    exact, theirs = (transformers_scores(ids, dtype) for dtype in (torch.float32, torch.bfloat16))
    llm = LLM("smollm2", dtype="bfloat16", num_kv_blocks=64, num_threads=1)
    assert "compiled: forward pass, decoder layers" in llm.engine.model_parts
    ours = own_scores(ids, llm)
    assert ours.logprobs.shape == exact.logprobs.shape
    assert abs(ours.perplexity() / exact.perplexity() - 1) < 0.01
    assert (ours.logprobs - exact.logprobs).abs().mean() <= (theirs.logprobs - exact.logprobs).abs().mean()
    assert ours.agreement(exact) >= max(0.97, theirs.agreement(exact))
