"""Caches of every dtype on CPU: written values, and attention over them, compared with torch and fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pagemill.kernels import dispatch, reference
from pagemill.kernels.cpu import operators as cpu
from pagemill.kernels.cpu.matmul import bf16
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.types.layer_cache import FP8, LayerCache, allocate_layer, as_bytes, largest_number
from tests.kernels.paged_case import assert_close, dense_attention, make_case

DTYPES = [torch.float16, torch.bfloat16, torch.int8, FP8]
SCALED = [torch.int8, FP8]


pytestmark = pytest.mark.usefixtures("two_threads")


def write(tokens: torch.Tensor, dtype: torch.dtype, *, block_size: int = 8) -> LayerCache:
    """A layer of two blocks whose first slots hold `tokens`, as keys and, negated, as values."""
    cache = allocate_layer(2, tokens.shape[1], block_size, tokens.shape[2], dtype)
    cpu.reshape_and_cache(tokens, -tokens, cache, torch.arange(len(tokens)))
    return cache


def stored(numbers: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first slots [num_tokens, num_kv_heads, ...] of a cache or of its scales."""
    return as_bytes(numbers).transpose(1, 2).flatten(0, 1)[:num_tokens]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80, "block_size": 8},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 24, "block_size": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options", [{}, {"alibi": True, "softcap": 2.0, "sliding_window": 37}], ids=["plain", "biased"]
)
def test_attention_computes_with_exactly_what_is_stored(dtype, shape, options):
    """Decode rows of one and of several splits, prompts, chunks, padding; poison in all unwritten memory."""
    case = make_case(
        [1, 1, 1, 7, 40, 2],
        [5, 300, 16, 7, 70, 290],
        cache_dtype=dtype,
        padded_tokens=3,
        free_outside_window=True,
        **shape,
        **options,
    )
    truth = dense_attention(case.in_double())
    out = cpu.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert_close(out, truth, case, 1e-5)
    twin = reference.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert_close(twin, truth, case, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (96, 8), (128, 64), (80, 16)])
@pytest.mark.parametrize(
    "options", [{}, {"alibi": True, "softcap": 2.0, "sliding_window": 37}], ids=["plain", "biased"]
)
def test_prompts_of_a_model_of_few_bits_round_queries_and_weights(cache_dtype, head_dim, block_size, options):
    """Near the exact result; single tokens unchanged."""
    lengths = [1, 1, 40, 7, 130], [5, 300, 70, 200, 130]
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
    case = make_case(
        *lengths, cache_dtype=cache_dtype, padded_tokens=3, free_outside_window=True, **shape, **options
    )
    scoring = replace(case.scoring, rounds_to_cache=True)
    out = cpu.paged_attention(case.query, case.cache, case.metadata, scoring)
    plain = cpu.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert_close(out, dense_attention(case.in_double()), case, 0.02)
    assert torch.equal(out[:2], plain[:2]), "single tokens are not rounded"
    is_rounded = bf16.is_native() and head_dim % PANEL == 0
    assert torch.equal(out, plain) is not is_rounded


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 37])
def test_rounded_prompts_do_not_depend_on_their_chunks(window, cache_dtype):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "sliding_window": window}
    case = make_case([1, 230], [5, 230], cache_dtype=cache_dtype, **shape)
    scoring = replace(case.scoring, rounds_to_cache=True)
    whole = cpu.paged_attention(case.query, case.cache, case.metadata, scoring)[1:]
    for first, last in ((0, 70), (70, 71), (71, 129), (129, 230)):
        chunk = replace(
            case.metadata,
            block_tables=case.metadata.block_tables[1:],
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
            query_lens_host=[last - first],
            seq_lens_host=[last],
            num_decode_rows=0,
            max_query_len=last - first,
            max_seq_len=last,
            work_lists={},
        )
        out = cpu.paged_attention(case.query[1 + first : 1 + last], case.cache, chunk, scoring)
        assert torch.equal(out, whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [7, 64, 96])
def test_writing_rounds_to_nearest_even_as_torch_does(dtype, head_dim):
    """Around every value of one byte, and halfway between adjacent ones; the limit in each row makes its scale 1."""
    limit = largest_number(dtype) or 1.0
    if dtype is FP8:
        numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    else:
        numbers = torch.arange(0, 127.25, 0.25)
    numbers = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.randn(50) * 3])
    numbers = torch.cat([numbers, -numbers, numbers * 1.0001, numbers / 1.0001]).clamp(-limit, limit)
    rows = torch.full((len(numbers) // (head_dim - 1) + 1, 1, head_dim), limit)
    flat = torch.zeros(rows.shape[0] * (head_dim - 1))
    flat[: len(numbers)] = numbers
    rows[:, 0, 1:] = flat.view(-1, head_dim - 1)
    cache = write(rows, dtype, block_size=len(rows))
    expected = (rows.round() if dtype is torch.int8 else rows).to(dtype)
    assert torch.equal(stored(cache.keys, len(rows)), as_bytes(expected))
    if cache.key_scales is not None:
        assert torch.equal(stored(cache.key_scales, len(rows)), torch.ones(len(rows), 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_equals_the_reference(dtype):
    torch.manual_seed(42)
    packed = torch.randn(300, 9, 80) * torch.rand(300, 9, 1) * 10
    packed[7] = 0.0
    key, value = packed[:, 2:5], packed[:, 5:8]
    slots = torch.randperm(25 * 16)[:300]
    slots[[0, 9, 299]] = -1
    caches = [allocate_layer(25, 3, 16, 80, dtype) for _ in range(2)]
    for cache, write_tokens in zip(caches, (cpu.reshape_and_cache, reference.reshape_and_cache), strict=True):
        for tensor in cache.tensors():
            as_bytes(tensor).fill_(77)
        write_tokens(key, value, cache, slots)
    ours, theirs = caches
    assert not any(numbers.isnan().any() for numbers in (ours.keys.float(), theirs.keys.float()))
    if not ours.is_scaled:
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        return
    for numbers, scales, expected, expected_scales in (
        (ours.keys, ours.key_scales, theirs.keys, theirs.key_scales),
        (ours.values, ours.value_scales, theirs.values, theirs.value_scales),
    ):
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0)
        # A multiplication by the reciprocal sometimes rounds differently from a quotient: by one step.
        steps = (as_bytes(numbers).to(torch.int16) - as_bytes(expected).to(torch.int16)).abs()
        assert steps.max() <= 1
        assert steps.float().mean() < 1e-3


@pytest.mark.parametrize("dtype", SCALED)
def test_a_scale_serves_one_token_and_head(dtype):
    """An outlier reduces precision only in its head of its token."""
    torch.manual_seed(42)
    tokens = torch.randn(6, 2, 64)
    calm = write(tokens, dtype)
    tokens[3, 1, 5] = 1e4
    wild = write(tokens, dtype)
    is_same = (stored(calm.keys, 6) == stored(wild.keys, 6)).all(-1)
    assert is_same.sum() == 11
    assert not is_same[3, 1]


def test_nan_stays_nan_in_half_precision():
    tokens = torch.tensor([[[math.nan, math.inf, -math.inf, 1e6]]]).expand(1, 1, 4).contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        cache = write(tokens, dtype)
        assert torch.equal(cache.keys[0, 0, 0], tokens[0, 0].to(dtype)) or cache.keys[0, 0, 0, 0].isnan()
        assert torch.equal(cache.keys[0, 0, 0, 1:], tokens[0, 0, 1:].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copying_blocks_moves_every_byte(dtype):
    torch.manual_seed(42)
    cache = write(torch.randn(8, 2, 16), dtype)
    for keys, values in ((cache.keys, cache.values), (cache.key_scales, cache.value_scales)):
        if keys is not None and values is not None:
            dispatch.copy_blocks(keys, values, [(0, 1)])
    for tensor in cache.tensors():
        assert torch.equal(as_bytes(tensor[0]), as_bytes(tensor[1]))
        assert as_bytes(tensor[1]).any()
