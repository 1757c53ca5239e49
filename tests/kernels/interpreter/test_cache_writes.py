"""The Triton kernels that write the cache, run by Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch, reference
from pagemill.kernels.types.layer_cache import FP8, LayerCache, allocate_layer, as_bytes
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

Caches = tuple[torch.Tensor, torch.Tensor]


def _caches(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Caches:
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    return key_cache, key_cache.clone()


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.nan_to_num(-7.0), right.nan_to_num(-7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_writes_its_slots_and_no_others(head_dim: int, dtype: torch.dtype) -> None:
    packed = torch.randn(19, 6, head_dim).to(dtype)
    key, value = packed[:, 2:4], torch.randn(2, 19, head_dim).to(dtype).transpose(0, 1)
    slots = torch.randperm(3 * 16)[:19]
    slots[[0, 7, 18]] = -1
    out, expected = _caches(3, 2, 16, head_dim, dtype), _caches(3, 2, 16, head_dim, dtype)
    with dispatch.override("triton"):
        dispatch.reshape_and_cache(key, value, LayerCache(*out), slots)
    reference.reshape_and_cache(key, value, LayerCache(*expected), slots)
    assert _same(out[0], expected[0])
    assert _same(out[1], expected[1])


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
@pytest.mark.parametrize("block_size", [8, 128])
def test_numbers_of_tokens(num_tokens: int, block_size: int) -> None:
    key, value = torch.randn(num_tokens, 1, 64), torch.randn(num_tokens, 1, 64)
    slots = torch.randperm(5 * block_size)[:num_tokens]
    out, expected = _caches(5, 1, block_size, 64, torch.float32), _caches(5, 1, block_size, 64, torch.float32)
    with dispatch.override("triton"):
        dispatch.reshape_and_cache(key, value, LayerCache(*out), slots)
    reference.reshape_and_cache(key, value, LayerCache(*expected), slots)
    assert _same(out[0], expected[0])
    assert _same(out[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, FP8])
def test_scaled_caches(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A scale per token and head; a token of zeros; padding. A quotient may round differently: by one step."""
    torch.manual_seed(42)
    key, value = ((torch.randn(19, 3, 80) * torch.rand(19, 3, 1)).to(dtype) for _ in range(2))
    key[4] = 0.0
    slots = torch.randperm(3 * 16)[:19]
    slots[[0, 7, 18]] = -1
    out, expected = (allocate_layer(3, 3, 16, 80, cache_dtype) for _ in range(2))
    for cache in (out, expected):
        for tensor in cache.tensors():
            as_bytes(tensor).fill_(77)
    with dispatch.override("triton"):
        dispatch.reshape_and_cache(key, value, out, slots)
    reference.reshape_and_cache(key, value, expected, slots)
    for ours, theirs in zip(out.tensors(), expected.tensors(), strict=True):
        if ours.dtype is torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
        else:
            steps = (as_bytes(ours).to(torch.int16) - as_bytes(theirs).to(torch.int16)).abs()
            assert steps.max() <= 1
            assert steps.float().mean() < 1e-3


def test_only_padding_writes_nothing() -> None:
    key_cache, value_cache = _caches(2, 1, 16, 64, torch.float32)
    tokens = torch.randn(4, 1, 64)
    with dispatch.override("triton"):
        layer = LayerCache(key_cache, value_cache)
        dispatch.reshape_and_cache(tokens, tokens, layer, torch.full((4,), -1))
    assert key_cache.isnan().all()
    assert value_cache.isnan().all()


@pytest.mark.parametrize("shape", [(6, 2, 16, 64), (6, 3, 8, 80), (6, 1, 128, 96)], ids=str)
def test_copy_blocks_equals_the_reference(shape: tuple[int, ...]) -> None:
    """One source for two destinations; blocks smaller and larger than a program's chunk."""
    key_cache, value_cache = torch.randn(shape), torch.randn(shape)
    expected = key_cache.clone(), value_cache.clone()
    pairs = [(0, 5), (0, 1), (3, 2)]
    with dispatch.override("triton"):
        dispatch.copy_blocks(key_cache, value_cache, pairs)
        dispatch.copy_blocks(key_cache, value_cache, [])
    reference.copy_blocks(*expected, pairs)
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


def test_addresses_past_the_range_of_int32() -> None:
    """A cache of more than 2^31 elements. Its pages are never touched, so it uses address space, not memory."""
    num_blocks = 2**31 // (16 * 64) + 8
    cache = torch.empty((num_blocks, 1, 16, 64), dtype=torch.float16)
    tokens = torch.randn(2, 1, 64, dtype=torch.float16)
    slots = torch.tensor([(num_blocks - 1) * 16, 5])
    with dispatch.override("triton"):
        dispatch.reshape_and_cache(tokens, tokens, LayerCache(cache, cache), slots)
        dispatch.copy_blocks(cache, cache, [(num_blocks - 1, num_blocks - 2)])
    assert torch.equal(cache[num_blocks - 1, 0, 0], tokens[0, 0])
    assert torch.equal(cache[num_blocks - 2, 0, 0], tokens[0, 0])
    assert torch.equal(cache[0, 0, 5], tokens[1, 0])
    metadata = AttentionMetadata(
        block_tables=torch.tensor([[num_blocks - 1]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        slot_mapping=slots[:1],
        query_lens_host=[1],
        seq_lens_host=[1],
        num_decode_rows=1,
        max_query_len=1,
        max_seq_len=1,
    )
    for num_decode_rows in (1, 0):  # by the decode kernel, then by the prefill kernel
        metadata.num_decode_rows = num_decode_rows
        with dispatch.override("triton"):
            out = dispatch.paged_attention(tokens[:1], LayerCache(cache, cache), metadata, Scoring(1.0))
        assert torch.equal(out, tokens[:1])
