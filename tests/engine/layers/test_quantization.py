"""8-bit weights and caches: the matmuls compared with exact integers, and the effect of the options on an engine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.kv_cache import num_blocks_for
from pagemill.engine.layers.int8_products import quantization_scheme
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.linear import Linear, LinearOptions
from pagemill.engine.llm import LLM
from pagemill.engine.models.loader import model_fingerprint
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import grouped_int8
from pagemill.kernels.types.layer_cache import FP8

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def make_llm(directory: str, **options: Any) -> LLM:
    defaults = {"kv_cache_memory_bytes": 2**20, "load_format": "dummy", "skip_tokenizer_init": True}
    return LLM(directory, **{**defaults, **options})


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    product = CpuBackend().product([weight], bias, LinearOptions("int8"))
    assert product is not None
    return Linear(product, weight.shape[1], weight.shape[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_is_its_kernels_product(has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(42)
    weight, x = torch.randn(96, 80).to(dtype), torch.randn(1, 33, 80).to(dtype)
    bias = torch.randn(96).to(dtype) if has_bias else None
    out = int8_linear(weight, bias)(x)
    assert out.shape == (1, 33, 96)
    assert out.dtype is dtype
    expected = grouped_int8.multiply(x[0], *grouped_int8.quantize(weight), bias)
    assert torch.equal(out[0], expected.to(dtype))


def test_without_the_compiler_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(42)
    weight, bias, x = torch.randn(96, 80), torch.randn(96), torch.randn(5, 80)
    compiled = int8_linear(weight, bias)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "numba" else find_spec(name, *rest)
    )
    plain = int8_linear(weight, bias)
    assert type(plain.product) is not type(compiled.product)
    assert torch.equal(plain(x), compiled(x))


def test_a_fingerprint_tells_schemes_of_int8_apart(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values with different rounding belong to another function: no job resumes from their checkpoint."""

    def fingerprint(quantization: Literal["int8"] | None) -> str:
        config = EngineConfig(model=directory, quantization=quantization, load_format="dummy")
        return model_fingerprint(Path(directory), config, torch.float32, CpuBackend(), 0)

    plain, grouped = fingerprint(None), fingerprint("int8")
    assert plain != grouped
    monkeypatch.setattr(CpuBackend, "int8_scale_span", f"{2 * grouped_int8.GROUP} inputs")
    assert fingerprint(None) == plain
    assert fingerprint("int8") != grouped


def test_the_cpu_says_how_many_inputs_share_a_scale_and_how_prompts_attend(monkeypatch) -> None:
    integers = f"{grouped_int8.GROUP} inputs; a file's own integers, their shortest scale"
    for is_native, attention in ((True, "; prompts' attention in bfloat16"), (False, "")):
        monkeypatch.setattr("pagemill.engine.devices.cpu._has_bf16_products", lambda native=is_native: native)
        assert CpuBackend().int8_scale_span == integers + attention


def test_cpu_and_cuda_have_schemes_of_their_own() -> None:
    spans = [device.int8_scale_span for device in (CpuBackend(), CudaBackend())]
    schemes = [quantization_scheme("int8", span) for span in spans] + [quantization_scheme("fp8", spans[1])]
    assert len(set(schemes)) == 3
    assert quantization_scheme(None, spans[0]) is None


def test_an_outlier_in_one_row_changes_no_other() -> None:
    torch.manual_seed(42)
    layer, x = int8_linear(torch.randn(64, 128), None), torch.randn(9, 128)
    calm = layer(x)
    x[4, 7] = 1e6
    wild = layer(x)
    assert torch.equal(calm[[0, 1, 2, 3, 5, 6, 7, 8]], wild[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert torch.equal(layer(x[2:3]), calm[2:3])


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head"),
    [(torch.float32, 256), (torch.float16, 128), (torch.bfloat16, 128), (torch.int8, 68), (FP8, 68)],
)
def test_fewer_bits_make_more_blocks(dtype: torch.dtype, bytes_per_head: int) -> None:
    """64 values per head, and 4 bytes for the scale if there is one."""
    shape = KVCacheShape(num_layers=3, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    assert shape.block_bytes == 3 * 2 * 2 * 16 * bytes_per_head
    config = EngineConfig(model="echo", kv_cache_memory_bytes=2**20)
    assert num_blocks_for(config, shape, CpuBackend()) == 2**20 // shape.block_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_cache_dtype",
    [
        "bfloat16",
        "int8",
        "float16",  # a minute of compiling each
        "fp8",
    ],
)
def test_a_quantized_cache_follows_fp32(kv_cache_dtype: str, directory: str) -> None:
    """Including copy-on-write and the prefix cache: scales move with their blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, n=2)
    prompts = [[1, 2, 3] * 13, [1, 2, 3] * 13 + [5], [7]]
    exact, rounded = make_llm(directory), make_llm(directory, kv_cache_dtype=kv_cache_dtype)
    assert rounded.engine.stats().loaded.tier == "continues"
    assert rounded.engine.stats().kv.capacity_blocks > 1.8 * exact.engine.stats().kv.capacity_blocks
    for ours, theirs in zip(rounded.generate(prompts, params), exact.generate(prompts, params), strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert abs((a.logprobs[0].logprob or 0.0) - (b.logprobs[0].logprob or 0.0)) < 0.02


@pytest.mark.slow
def test_int8_weights_take_a_quarter(directory: str) -> None:
    exact, rounded = make_llm(directory), make_llm(directory, quantization="int8")
    assert rounded.engine.stats().loaded.tier == "continues"
    embedding = 4 * 101 * 64
    linear = exact.engine.stats().memory_bytes["weights"] - embedding
    assert rounded.engine.stats().memory_bytes["weights"] - embedding < 0.35 * linear


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "int4"}, {"quantization": "int4"}], ids=str)
def test_what_is_unknown_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        EngineConfig(model="echo", **option)


def test_fp8_products_are_refused_on_a_cpu(directory: str) -> None:
    with pytest.raises(ConfigError, match=r"quantization='fp8' needs a GPU .* use int8") as caught:
        make_llm(directory, quantization="fp8")
    assert caught.value.setting == "quantization"


@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((12, 0), False)]
)
def test_fp8_products_need_a_gpu_that_has_them(
    capability: tuple[int, int], refused: bool, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = EngineConfig(model=directory, quantization="fp8")
    if not refused:
        CudaBackend().check(config, torch.bfloat16)
        return
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or newer; use int8") as caught:
        CudaBackend().check(config, torch.bfloat16)
    assert caught.value.setting == "quantization"


@pytest.mark.parametrize("capability", [(6, 1), (7, 5)])
def test_gpus_without_the_kernels_instructions_are_refused(
    capability: tuple[int, int], directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = f"{capability[0]}.{capability[1]}"
    with pytest.raises(
        ConfigError, match=rf"{found} is not supported.* 8\.0 or newer; use device=cpu"
    ) as caught:
        CudaBackend().check(EngineConfig(model=directory), torch.float16)
    assert caught.value.setting == "device"


@pytest.mark.parametrize(
    ("dtype", "asked", "warns"),
    [(torch.float32, "auto", True), (torch.float32, "float32", False), (torch.bfloat16, "auto", False)],
)
def test_a_checkpoint_in_float32_is_reported_on_a_gpu(
    dtype: torch.dtype,
    asked: Literal["auto", "float32"],
    warns: bool,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    CudaBackend().check(EngineConfig(model=directory, dtype=asked), dtype)
    assert ("dtype=bfloat16 is faster" in caplog.text) is warns


@pytest.mark.parametrize("offset", [0.0, 0.375])
def test_a_files_own_integers_are_not_rounded_again(offset: float) -> None:
    """Rows of integers are exact in 8 bits: the only remaining error is fp32's own rounding."""
    torch.manual_seed(42)
    numbers = torch.randint(-8, 8, (64, 4, grouped_int8.GROUP)).float()
    weight = (numbers * torch.rand(64, 4, 1).half().float() + offset).flatten(1)
    x = torch.randint(-127, 128, (9, 128)).float()
    x[:, :: grouped_int8.GROUP] = 127.0
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(
        int8_linear(weight, None)(x), exact, rtol=0, atol=1e-6 * float(exact.abs().max())
    )


def test_packed_weights_are_among_the_tensors_that_count_as_memory() -> None:
    layer = int8_linear(torch.randn(64, 128), None)
    some = layer.of_channels(torch.tensor([3, 40]))
    assert some is not None
    for product in (layer.product, some.product):
        tensors = [value for value in vars(product).values() if isinstance(value, torch.Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) > 64 * 128
