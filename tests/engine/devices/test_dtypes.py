"""Every dtype has a separate kernel on every CPU with AVX2: none is emulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite import binding
from transformers import AutoModelForCausalLM

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import cpu
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_model import save_tiny_llama
from tests.kernels.cpu.another_cpu import environment_of

AVX2 = ("avx", "avx2", "fma", "f16c", "sse4.2")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
CPUS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AVX2": ("haswell", AVX2),
    "AVX-512": ("skylake-avx512", AVX512),
    "AVX-512 VNNI": ("cascadelake", (*AVX512, "avx512vnni")),
    "AVX-512 BF16": ("cooperlake", (*AVX512, "avx512vnni", "avx512bf16")),
}
FP32, HALF, BF16 = "PackedProduct, 32 bits", "PackedProduct, 16 bits", "PackedBf16Product, 16 bits"
KERNELS = {
    name: {"float32": FP32, "bfloat16": HALF, "float16": HALF, "int8": "PackedInt8Product, 9 bits"}
    for name in CPUS
}
KERNELS["AVX-512 BF16"]["bfloat16"] = BF16
LIST = """
import json, torch
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.linear import LinearOptions

torch.manual_seed(0)
weight, device, found = torch.randn(256, 512), CpuBackend(), {}
for name in ("float32", "bfloat16", "float16", "int8"):
    dtype = torch.float32 if name == "int8" else getattr(torch, name)
    assert device.module_dtype(dtype) is torch.float32 and device.has_kernels(dtype)
    product = device.product([weight], None, LinearOptions("int8" if name == "int8" else None, dtype=dtype))
    found[name] = f"{type(product).__name__}, {8 * product.panels.nbytes // weight.numel()} bits"
print(json.dumps(found))
"""
"""Prints the kernel for each dtype, and the bits of a weight, including scales."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CPUS)
def test_a_kernel_serves_every_dtype(name: str) -> None:
    cpu_name, features = CPUS[name]
    host = binding.get_host_cpu_features()
    if missing := [feature for feature in features if not host.get(feature)]:
        pytest.skip(f"this CPU lacks {missing}")
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        env=environment_of(cpu_name, features), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == KERNELS[name]


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_has_bf16_products", lambda: False)
    if not CpuBackend().has_kernels(torch.float16):
        pytest.skip("this CPU has neither AVX2 nor AVX-512")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_results_are_those_of_the_rounded_model_in_fp32(
    name: str, without_bf16: None, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path / "whole")
    dtype = getattr(torch, name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter is not model.get_input_embeddings().weight:
            parameter.data = parameter.data.to(dtype).float()
    model.save_pretrained(tmp_path / "rounded")

    def run(which: str, dtype: Any) -> tuple[list[Any], str]:
        options: dict[str, Any] = {"num_kv_blocks": 64, "num_threads": 1, "skip_tokenizer_init": True}
        llm = LLM(
            str(tmp_path / which), dtype=dtype, kv_cache_dtype="float32", batch_invariant=True, **options
        )
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
        results = llm.generate([[5, 8, 2, 7] * 3, [3]], params, use_tqdm=False)
        return [result.outputs[0].logprobs for result in results], llm.engine.stats().loaded.fingerprint

    stored, fingerprint = run("whole", name)
    assert stored == run("rounded", "float32")[0]
    exact, other = run("whole", "float32")
    assert stored != exact
    assert fingerprint != other


@pytest.mark.slow
def test_experts_are_rounded_alike(without_bf16: None) -> None:
    torch.manual_seed(1)
    weight, rows, offsets = torch.randn(3, 64, 96), torch.randn(10, 96), torch.tensor([0, 4, 4, 10])

    def product(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        options = LinearOptions(dtype=dtype)
        out: torch.Tensor = CpuBackend().grouped_product(ExpertMatrices.from_tensors(weight), options)(
            rows, offsets
        )
        return out

    rounded = product(weight.bfloat16().float(), torch.float32)
    assert torch.equal(product(weight, torch.bfloat16), rounded)
    assert not torch.equal(product(weight, torch.float32), rounded)


def test_emulation_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu, "_has_bf16_products", lambda: False)
    monkeypatch.setattr(cpu, "_has_own_products", lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        CpuBackend().check(EngineConfig(model="smollm2"), dtype)
    (warning,) = caplog.messages
    assert warning == "torch emulates bfloat16 on this CPU, slowly: dtype=float32 is faster"


def test_int8_without_fast_products_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for is_fast in (True, False):
        monkeypatch.setattr(cpu, "_has_fast_int8_products", lambda is_fast=is_fast: is_fast)
        for quantization in (None, "int8"):
            CpuBackend().check(EngineConfig(model="smollm2", quantization=quantization), torch.float32)
    (warning,) = caplog.messages
    assert warning == "int8 may be slower than float32 on this CPU, which does not have AVX2"
