"""The startup report of a model's parts, and the same without its weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pagemill.engine.builder import describe_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import cpu
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.layers.decoder_traits import LLAMA_DECODER
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.layers.part_report import describe_parts
from pagemill.engine.llm import LLM
from pagemill.kernels.cpu.matmul import bf16, fp32
from tests.engine.models.families.native_cases import NATIVE_CASES
from tests.engine.tiny_model import save_tiny_llama

COMPILED = (
    "compiled: forward pass, decoder layers, attention, MLP, norms; fused: linear layers; "
    "transformers' own: nothing; matmuls: own"
)
OWN = "compiled: nothing; fused: {fused}; transformers' own: forward pass, decoder layers{own}; matmuls: own"
needs_own_kernel = pytest.mark.skipif(not fp32.is_supported(), reason="made for AVX2 and AVX-512")


@needs_own_kernel
def test_a_start_logs_how_each_part_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_llama(tmp_path)
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=8, num_threads=1)
    assert f"{tmp_path.name}: {COMPILED}" in caplog.messages


@needs_own_kernel
def test_an_outline_says_the_same_without_weights(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert describe_model(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)) == COMPILED


@pytest.mark.parametrize(
    ("case", "fused", "own"),
    [
        ("gpt2", "linear layers", ", attention, MLP, norms"),
        ("gemma2", "attention, norms, linear layers", ", MLP"),
    ],
)
def test_what_stays_transformers_own_is_said(case: str, fused: str, own: str, tmp_path: Path) -> None:
    NATIVE_CASES[case]().write(tmp_path)
    config = EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)
    assert describe_model(config) == OWN.format(fused=fused, own=own)


def test_half_precision_without_our_kernels_is_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_has_own_products", lambda: False)
    save_tiny_llama(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float16", skip_tokenizer_init=True)
    everything = ", attention, MLP, norms, linear layers"
    assert describe_model(config) == OWN.format(fused="nothing", own=everything).removesuffix(
        "; matmuls: own"
    )


@pytest.mark.skipif(not bf16.is_native(), reason="needs a CPU with AVX-512 BF16")
def test_bfloat16_is_compiled_where_the_cpu_multiplies_it(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True)
    assert describe_model(config) == COMPILED


def test_cuda_fuses_layers() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes))
    CudaBackend().fuse(model, LLAMA_DECODER, torch.float32, LinearOptions())
    told = describe_parts(model, is_direct=False)
    assert told == (
        "compiled: nothing; fused: decoder layers, attention, MLP, norms, linear layers; "
        "transformers' own: forward pass"
    )
