"""The compiled decoder layer compared with the modules that it replaces, bit for bit."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer, can_be_compiled
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.int8_products import PlainInt8Product
from pagemill.engine.layers.linear import LinearOptions, PackedProduct
from pagemill.engine.models.families.registry import find_family
from pagemill.kernels.cpu.matmul.weight_formats import BFLOAT16, BYTES, FLOAT16, NIBBLES
from pagemill.kernels.types.layer_cache import LayerCache, allocate_layer
from pagemill.kernels.types.metadata import AttentionMetadata

cpu_matmul = pytest.importorskip("pagemill.kernels.cpu.matmul.fp32")
HAS_FP32_PRODUCTS = cpu_matmul.is_supported() and torch._C._has_mkldnn
with_every_product = pytest.mark.parametrize("kind", ["fp32", "int8", "bf16"])
LINEAR = {
    "fp32": LinearOptions(),
    "int8": LinearOptions("int8"),
    "bf16": LinearOptions(dtype=torch.bfloat16),
}

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 4, 96, 4
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5, "head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "qwen3": {"head_dim": 24},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
}


pytestmark = pytest.mark.usefixtures("two_threads")


def fused_model(
    family: str, kind: str = "fp32", rounding: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """`rounding`: the operation on weights, by parts of their names."""
    if kind == "fp32" and not HAS_FP32_PRODUCTS:
        pytest.skip("layers of fp32 products are compiled where the CPU has AVX2")
    sizes = {
        "vocab_size": 50, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 6, "num_key_value_heads": 2,
    }  # fmt: skip
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(sizes | FAMILIES[family] | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        for part, rounded in (rounding or {}).items():
            if part in name and parameter.dim() == 2:
                parameter.data = rounded(parameter.data)
    fuse_for_cpu(model, LINEAR[kind])
    return model


def fuse_for_cpu(model: Any, linear: LinearOptions) -> None:
    """Rewrite a model as startup on the CPU does."""
    CpuBackend().fuse(model, traits_of(model), torch.float32, linear)


def traits_of(model: Any) -> DecoderTraits:
    traits = find_family({"model_type": model.config.model_type}).decoder
    assert traits is not None
    return traits


def step(query_lens: list[int], seq_lens: list[int], num_padded: int = 0) -> AttentionMetadata:
    """Rows of one token first, as in a batch; each row in separate blocks."""
    num_decode_rows = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    blocks = iter(torch.randperm(NUM_BLOCKS).tolist())
    longest = max(-(-length // BLOCK_SIZE) for length in seq_lens)
    tables = torch.zeros(len(seq_lens), longest, dtype=torch.int32)
    slots: list[int] = []
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for i in range(-(-length // BLOCK_SIZE)):
            tables[row, i] = next(blocks)
        for position in range(length - count, length):
            slots.append(int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return AttentionMetadata(
        block_tables=tables, query_start_loc=starts, seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * num_padded), query_lens_host=query_lens,
        seq_lens_host=seq_lens, num_decode_rows=num_decode_rows, max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )  # fmt: skip


def random_caches(model: Any, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    """Caches with content as if many tokens had been written."""
    attention = model.model.layers[0].source.self_attn
    caches = []
    for _ in range(NUM_LAYERS):
        cache = allocate_layer(NUM_BLOCKS, attention.num_kv_heads, BLOCK_SIZE, attention.head_dim, dtype)
        for tensor in cache.tensors():
            numbers = torch.randn(tensor.shape) * (10 if dtype is torch.int8 else 1)
            tensor.copy_(numbers.abs() if tensor.dim() < 4 else numbers)
        caches.append(cache)
    return caches


def assert_same(model: Any, metadata: AttentionMetadata, dtype: torch.dtype = torch.float32) -> None:
    num_tokens = len(metadata.slot_mapping)
    ids, positions = torch.randint(50, (1, num_tokens)), torch.arange(num_tokens)[None] % 7
    caches = random_caches(model, dtype)
    theirs = [LayerCache(*(tensor.clone() for tensor in cache.tensors())) for cache in caches]
    layers = model.model.layers

    def run(layers_caches: list[LayerCache]) -> torch.Tensor:
        with torch.inference_mode(), attention_context(AttentionContext(metadata, layers_caches)):
            out: torch.Tensor = model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        return out

    ours = run(caches)
    fused = list(layers)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in fused)
    try:
        for i, layer in enumerate(fused):
            layers[i] = layer.source
        expected = run(theirs)
    finally:
        for i, layer in enumerate(fused):
            layers[i] = layer
    assert torch.isfinite(expected).all()
    assert torch.equal(ours, expected)
    for cache, other in zip(caches, theirs, strict=True):
        for ours, expected in zip(cache.tensors(), other.tensors(), strict=True):
            assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.slow
@with_every_product
@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers_in_every_family(family: str, kind: str) -> None:
    model = fused_model(family, kind)
    for query_lens, seq_lens, num_padded in (
        ([1], [1], 0),
        ([1, 1, 1], [9, 1, 17], 0),
        ([1, 1, 6, 3], [4, 12, 6, 19], 2),
        ([9], [21], 0),
    ):
        assert_same(model, step(query_lens, seq_lens, num_padded))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.int8,
        torch.float16,  # a minute of compiling each
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_same_numbers_with_every_cache(dtype: torch.dtype) -> None:
    assert_same(fused_model("qwen3"), step([1, 1, 6], [9, 3, 15]), dtype)


@pytest.mark.slow
def test_same_numbers_where_prompts_are_rounded() -> None:
    model = fused_model("llama", "bf16", head_dim=32)
    for lengths in (([9], [21]), ([1, 1, 40, 3], [9, 30, 100, 3])):
        assert_same(model, step(*lengths, num_padded=2), torch.bfloat16)


@pytest.mark.slow
@with_every_product
def test_same_numbers_where_heads_are_no_multiple_of_a_vector(kind: str) -> None:
    model = fused_model("llama", kind, head_dim=10)
    assert_same(model, step([1, 1, 11], [3, 30, 11], 1))


@pytest.mark.slow
@with_every_product
def test_same_numbers_where_threads_share_the_rows(kind: str) -> None:
    model = fused_model("llama", kind, hidden_size=96, intermediate_size=256, head_dim=16)
    assert_same(model, step([1] * 3 + [200], [5, 6, 7, 300]))


@pytest.mark.slow
@with_every_product
@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_take_rows_or_channels(monkeypatch: pytest.MonkeyPatch, num_threads: int, kind: str) -> None:
    from pagemill.kernels.cpu.matmul.work_sharing import BLOCK_ROWS

    monkeypatch.setattr(f"{__name__}.NUM_BLOCKS", 1024)
    model = fused_model("llama", kind)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for rows in ([1], [1] * 13, [1] * 29, [1, 2, 137], [141], [BLOCK_ROWS + 7] * 4):
            assert_same(model, step(rows, rows))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@with_every_product
def test_more_inputs_than_the_cache_holds_for_a_block_of_rows(kind: str) -> None:
    model = fused_model("llama", kind, hidden_size=2688, intermediate_size=1600, head_dim=16)
    for rows in ([1], [40], [90], [150]):
        assert_same(model, step(rows, rows))


@pytest.mark.slow
@with_every_product
def test_threads_have_fixed_channels_of_rows_that_no_cache_holds(kind: str) -> None:
    """Many threads and rows: possibly more than this machine has, so the kernel gets their number."""
    from pagemill.kernels.cpu.layer.layer import LAYER, describe
    from pagemill.kernels.cpu.matmul import converted_mlp, fp32_mlp
    from pagemill.kernels.cpu.matmul.kinds import KINDS

    model = fused_model("llama", kind, hidden_size=96, intermediate_size=224, head_dim=16)
    layer = model.model.layers[0]
    record = np.zeros(1, LAYER)
    describe(record[0], layer.layer)
    number = KINDS[kind]
    mlp_parallel = fp32_mlp.mlp_parallel if kind == "fp32" else partial(converted_mlp.mlp_parallel, number)
    x, num_rows = torch.randn(300, 96), 300
    with torch.inference_mode():
        expected = layer.source.mlp(x)
    gated = torch.empty(num_rows * 224 + 16)
    address = -(-gated.data_ptr() // 64) * 64
    for num_threads in (1, 2, 5, 16):
        rows = x.clone()
        mlp_parallel(record, rows.data_ptr(), address, num_rows, num_threads)
        assert torch.equal(rows, expected)


@pytest.mark.slow
@with_every_product
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_finishes_what_is_read_and_caches_the_rest(family: str, kind: str) -> None:
    # Wider than queries, keys and values together: their buffer holds hidden states here.
    sizes = {"hidden_size": 96, "head_dim": 8} if family == "llama" else {}
    model = fused_model(family, kind, **sizes)
    layers = list(model.model.layers)
    assert [layer.is_last for layer in layers] == [False] * (len(layers) - 1) + [True]
    metadata = step([1, 1, 6, 3], [4, 12, 6, 19], num_padded=2)
    ids, positions = torch.randint(50, (1, 13)), torch.arange(13)[None] % 7
    caches = random_caches(model)

    def run(read_tokens: list[int] | None) -> tuple[torch.Tensor, list[LayerCache]]:
        mine = [LayerCache(*(tensor.clone() for tensor in cache.tensors())) for cache in caches]
        read = None if read_tokens is None else torch.tensor(read_tokens, dtype=torch.int64)
        with torch.inference_mode(), attention_context(AttentionContext(metadata, mine, read)):
            return model.model(input_ids=ids, position_ids=positions, use_cache=False)[0][0], mine

    everything, everywhere = run(None)
    for read_tokens in ([0, 1, 7, 10], [12], [*range(13)], [0, 2], []):
        some, written = run(read_tokens)
        assert torch.equal(some[read_tokens], everything[read_tokens])
        for cache, other in zip(written, everywhere, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), other.tensors(), strict=True))
    assert not torch.equal(run([0])[0][5], everything[5])  # not requested, so not computed


def _integers(per_one: int, most: int) -> Any:
    return lambda weight: (per_one * weight).round().clamp(-most, most) / 32


def test_products_of_a_layer_keep_their_weights_in_formats_of_their_own() -> None:
    rounding = {
        "mlp": lambda weight: weight.bfloat16().float(),
        "down": _integers(200, 100),
        "o_proj": lambda weight: weight.half().float(),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _integers(20, 7)),
    }
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6}
    model = fused_model("llama", rounding=rounding, **sizes)
    source = model.model.layers[0].source
    products = (
        source.self_attn.qkv_proj, source.self_attn.o_proj, source.mlp.gate_up_proj, source.mlp.down_proj,
    )  # fmt: skip
    assert [linear.product.packed.weight_format for linear in products] == [NIBBLES, FLOAT16, BFLOAT16, BYTES]
    assert_same(model, step([1, 1, 40, 3], [9, 30, 44, 3], num_padded=2))


def test_buffers_shrink_and_grow_with_the_step() -> None:
    model = fused_model("llama")
    for count in (1, 40, 2):
        assert_same(model, step([count], [count + 3]))


def test_a_kind_of_product_compiles_that_product_alone() -> None:
    from numba import types

    from pagemill.kernels.cpu.matmul.kinds import choose_converted, choose_kernel

    for chosen, name in (
        (choose_kernel(types.float32, "fp32", "converted"), "fp32"),
        (choose_kernel(types.uint8, "fp32", "converted"), "converted"),
        (choose_converted(types.uint8, "int8", "bf16"), "int8"),
        (choose_converted(types.uint16, "int8", "bf16"), "bf16"),
    ):
        names = inspect.getclosurevars(chosen)
        assert [*names.nonlocals.values()] == [name]
        assert not names.globals


def test_a_layer_whose_sizes_are_no_whole_panels_stays_as_it_is() -> None:
    for sizes in ({"intermediate_size": 72}, {"hidden_size": 24, "head_dim": 8}):
        model = fused_model("llama", **sizes)
        assert not any(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers)


@pytest.mark.parametrize("other", [PackedProduct, PlainInt8Product])
def test_a_layer_of_other_products_stays_as_it_is(other: type[Any]) -> None:
    layer = fused_model("llama", "int8").model.layers[0].source
    assert can_be_compiled(layer)
    weight = torch.zeros(48, 96)  # fp32 next to int8; or int8, not packed: as without the kernels' compiler
    layer.mlp.down_proj.product = (
        PackedProduct.from_weights([weight], None) if other is PackedProduct else other(weight, None)
    )
    assert not can_be_compiled(layer)


def test_a_merged_mlp_of_another_activation_is_not_compiled() -> None:
    """Phi 3's gate and up are one layer, for every part that is computed."""
    model = fused_model("phi3", hidden_act="gelu")
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers)
