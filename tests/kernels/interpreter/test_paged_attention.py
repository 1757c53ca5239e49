"""The Triton attention kernels, run by Triton's interpreter, against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagemill.kernels import dispatch, reference
from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.gpu.attention_prefill import build_work_list, paged_attention_prefill
from pagemill.kernels.gpu.attention_tile import INTERPRETED
from pagemill.kernels.gpu.tuning import Splits, Tile
from pagemill.kernels.types.layer_cache import FP8
from tests.kernels.paged_case import TOLERANCE, PagedCase, assert_close, make_case

assert INTERPRETED

# The interpreter's time depends on operations, not on elements: large tiles, few heads, few rows.
SMALL = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}


def _poisoned(query: torch.Tensor) -> torch.Tensor:
    return torch.full(query.shape, float("nan"), dtype=query.dtype)


def _truth(case: PagedCase) -> torch.Tensor:
    double = case.in_double()
    return reference.paged_attention(double.query, double.cache, double.metadata, double.scoring)


def _check(case: PagedCase, tolerance: float | None = None) -> None:
    with dispatch.override("triton"):
        out = dispatch.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert out.dtype == case.query.dtype
    assert_close(out, _truth(case), case, tolerance or TOLERANCE[case.query.dtype])


def _decode(case: PagedCase, **plan: object) -> torch.Tensor:
    """Only the decode kernel, over the decode rows."""
    rows = case.metadata.num_decode_rows
    out = _poisoned(case.query)
    paged_attention_decode(
        out[:rows],
        case.query[:rows],
        case.cache,
        case.metadata.block_tables[:rows],
        case.metadata.seq_lens[:rows],
        case.scoring,
        max_seq_len=case.metadata.max_seq_len,
        **plan,  # type: ignore[arg-type]
    )
    return out


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_decode_at_block_boundaries(block_size: int) -> None:
    lens = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1]
    _check(make_case([1] * len(lens), lens, block_size=block_size, **SMALL))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_prefill_at_block_boundaries(block_size: int) -> None:
    """A prompt of just under, at and just over a block, and a chunk that ends at a block boundary."""
    query_lens = [block_size - 1, block_size, block_size + 1, 2]
    seq_lens = [block_size - 1, block_size, block_size + 1, 2 * block_size]
    _check(make_case(query_lens, seq_lens, block_size=block_size, **SMALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [1, 7, 24, 33, 48, 63, 80, 96, 100, 129, 160, 192, 250])
def test_block_sizes_that_no_tile_divides(block_size: int, dtype: torch.dtype) -> None:
    """A tile may start in one block and end in another, or in the one after that."""
    lens = [150, 2 * block_size + 5, block_size + 200]
    _check(make_case([1, 1, 40], lens, block_size=block_size, dtype=dtype, **SMALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(2, 2), (6, 2), (14, 2), (16, 1), (48, 1), (71, 1)],
    ids=lambda count: str(count),
)
def test_group_sizes_in_a_mixed_batch(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    _check(
        make_case(
            [1, 1, 5], [18, 70, 37], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_dims_in_a_mixed_batch(head_dim: int, dtype: torch.dtype) -> None:
    """bf16 by the upcast that the interpreter needs: this shows that no kernel still has a matmul of bf16 tiles."""
    _check(make_case([1, 6], [33, 40], num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, torch.int8, FP8])
def test_cache_dtypes_in_a_mixed_batch(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Full tiles, masked tiles and a merge; unwritten memory is poison, including scales."""
    case = make_case(
        [1, 1, 90],
        [33, 300, 100],
        num_heads=4,
        num_kv_heads=2,
        head_dim=80,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    _check(case)
    tile = Tile(block_m=16, block_n=32, num_warps=4, num_stages=1)
    out = _decode(case, tile=tile, splits=Splits(3, 64))
    assert (out[:2].double() - _truth(case)[:2]).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("cache_dtype", [torch.int8, FP8])
def test_scaled_caches_under_every_option(cache_dtype: torch.dtype) -> None:
    case = make_case(
        [1, 20],
        [200, 150],
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_size=128,
        cache_dtype=cache_dtype,
        alibi=True,
        softcap=2.0,
        sliding_window=33,
    )
    _check(case)


@pytest.mark.parametrize("cache_dtype", [torch.int8, FP8])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1e-9, torch.bfloat16), (1e-3, torch.float16), (1e3, torch.bfloat16)], ids=str
)
def test_scaled_caches_of_any_size(size: float, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Matmuls are in fp16, whose range is 39 bits: values of any size, next to ones a million times larger."""
    case = make_case(
        [1, 1, 20],
        [200, 70, 90],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    assert case.cache.value_scales is not None
    case.cache.value_scales.mul_(size)
    some = case.metadata.block_tables[0, 3:5].long()  # of 13 blocks
    for factor in (1.0, 1e6):
        case.cache.value_scales[some] *= factor
        with dispatch.override("triton"):
            out = dispatch.paged_attention(case.query, case.cache, case.metadata, case.scoring)
        truth = _truth(case)
        error = (out.double() - truth).abs().amax((1, 2)) / truth.abs().amax((1, 2))
        assert error.max() <= TOLERANCE[dtype]


def test_queries_beyond_the_range_of_fp16() -> None:
    case = make_case(
        [1, 20], [70, 90], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, cache_dtype=FP8
    )
    case.query = (case.query.float() * torch.logspace(-30, 30, 64)).bfloat16()
    case.query[1] *= 0
    case.scoring = replace(case.scoring, scale=1e-31)
    _check(case)


def test_chunks_of_one_prompt_equal_the_whole() -> None:
    whole = make_case([90], [90], num_heads=6, num_kv_heads=2, head_dim=64)
    _check(whole)
    for first, last in [(0, 1), (1, 17), (17, 64), (64, 90)]:
        chunk = make_case([last - first], [last], num_heads=6, num_kv_heads=2, head_dim=64)
        chunk.cache = whole.cache
        chunk.metadata.block_tables = whole.metadata.block_tables
        chunk.query = whole.query[first:last]
        _check(chunk)


@pytest.mark.parametrize("padded_decode_rows", [0, 3])
@pytest.mark.parametrize("query_lens", [[1, 1], [7], [1, 7]], ids=str)
def test_padded_rows_and_tokens_change_nothing(query_lens: list[int], padded_decode_rows: int) -> None:
    _check(
        make_case(
            query_lens,
            [20 + query_len for query_len in query_lens],
            padded_decode_rows=padded_decode_rows,
            padded_tokens=5,
            **SMALL,
        )
    )


def test_a_padded_row_writes_nothing() -> None:
    case = make_case([1], [40], padded_decode_rows=2, **SMALL)
    for num_splits in (1, 2):
        out = _decode(case, splits=Splits(num_splits, 256))
        assert not out[0].isnan().any()
        assert out[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"alibi": True}, {"softcap": 2.0}, {"sliding_window": 1}, {"sliding_window": 16},
        {"sliding_window": 70}, {"sliding_window": 1000}, {"sliding_window": -16}, {"sliding_window": -50},
        {"alibi": True, "softcap": 2.0, "sliding_window": 33}, {"sinks": True},
        {"sinks": True, "alibi": True, "softcap": 2.0, "sliding_window": 33},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_options(options: dict[str, object], dtype: torch.dtype) -> None:
    """Long enough that a window skips tiles; blocks before the window are no longer in the table."""
    _check(
        make_case(
            [1, 20],
            [200, 150],
            num_heads=6,
            num_kv_heads=2,
            head_dim=64,
            dtype=dtype,
            free_outside_window=True,
            **options,  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize("sliding_window", [None, 50, -500])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 20])
@pytest.mark.parametrize("sinks", [False, True])
def test_splits_merge_to_the_whole(sinks: bool, num_splits: int, sliding_window: int | None) -> None:
    """Rows that use all splits, some, one and none of them; 20 is more than the merge kernel processes together."""
    options: dict[str, Any] = {"sliding_window": sliding_window, "sinks": sinks} | SMALL
    case = make_case([1] * 4, [1, 32, 65, 640], padded_decode_rows=1, **options)
    tile = Tile(block_m=16, block_n=32, num_warps=4, num_stages=1)
    out = _decode(case, tile=tile, splits=Splits(num_splits, 32))
    assert_close(out, _truth(case), case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("sinks", [None, torch.tensor([900.0, -900.0])])
def test_large_scores_overflow_nothing(sinks: torch.Tensor | None) -> None:
    """Scores of several hundred, of which exp2 alone would be infinite; in a split, a merge and a prefill tile."""
    case = make_case([1, 1, 8], [640, 40, 90], **SMALL)
    case.scoring = replace(case.scoring, scale=20.0, sinks=sinks)
    _check(case, tolerance=1e-3)
    tile = Tile(block_m=16, block_n=32, num_warps=4, num_stages=1)
    out = _decode(case, tile=tile, splits=Splits(4, 32))
    assert (out[:2] - _truth(case)[:2]).abs().max() < 1e-3


def test_a_row_does_not_depend_on_its_batch_at_a_fixed_split_size() -> None:
    """Enough splits for the longest row: every split is `min_tokens` long, so no bit depends on the batch."""
    case = make_case([1, 1, 1], [130, 300, 77], **SMALL)
    tile = Tile(block_m=16, block_n=32, num_warps=4, num_stages=1)
    plan: dict[str, object] = {"tile": tile, "splits": Splits(5, 64)}
    together = _decode(case, **plan)
    for row in range(3):
        out = _poisoned(case.query[row : row + 1])
        paged_attention_decode(
            out,
            case.query[row : row + 1],
            case.cache,
            case.metadata.block_tables[row : row + 1],
            case.metadata.seq_lens[row : row + 1],
            case.scoring,
            max_seq_len=300,
            **plan,  # type: ignore[arg-type]
        )
        assert torch.equal(out[0], together[row])


def test_a_group_larger_than_the_tile_is_cut() -> None:
    case = make_case([1, 1], [50, 20], num_heads=71, num_kv_heads=1, head_dim=64)
    out = _decode(case, tile=Tile(block_m=32, block_n=64, num_warps=4, num_stages=1), splits=Splits(2, 256))
    assert_close(out, _truth(case), case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("group_size", [1, 3, 71])
def test_prefill_tiles_cut_anywhere(group_size: int) -> None:
    """Tiles of 32 (token, head) pairs: a tile ends within a token's heads, and a token spans tiles."""
    case = make_case([9, 40], [9, 100], num_heads=group_size, num_kv_heads=1, head_dim=64)
    if group_size == 71:
        case = make_case([3], [40], num_heads=group_size, num_kv_heads=1, head_dim=64)
    out = _poisoned(case.query)
    tile = Tile(block_m=32, block_n=32, num_warps=4, num_stages=1)
    paged_attention_prefill(out, case.query, case.cache, case.metadata, case.scoring, tile=tile)
    assert_close(out, _truth(case), case, TOLERANCE[torch.float32])


def test_strided_query_of_a_packed_projection() -> None:
    case = make_case([1, 4], [20, 30], num_heads=4, num_kv_heads=2, head_dim=64)
    packed = torch.full((5, 8, 64), float("nan"))
    packed[:, 2:6] = case.query
    truth = _truth(case)
    case.query = packed[:, 2:6]
    with dispatch.override("triton"):
        out = dispatch.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert out.is_contiguous()
    assert_close(out, truth, case, TOLERANCE[torch.float32])


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    case = make_case([1, 1, 4, 4], [20, 20, 30, 30], num_heads=2, num_kv_heads=1, head_dim=64)
    truth = _truth(case)
    poisoned = [1, 2, 3, 4, 5]  # the second decode row and the first prompt
    case.query[poisoned] = float("nan")
    with dispatch.override("triton"):
        out = dispatch.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert out[poisoned].isnan().all()
    clean = [0, 6, 7, 8, 9]
    assert (out[clean] - truth[clean]).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "check",
    [
        lambda work: work.tolist() == [[2, 8], [2, 0], [1, 0]],
        lambda work: work.dtype.name == "int32",
    ],
)
def test_work_list_starts_with_the_longest_and_skips_padding(check: Callable[[object], bool]) -> None:
    """Row 0 is a decode row; row 1 has 2 tokens and 5 keys, row 2 has 5 tokens and 100 keys; row 3 is padding."""
    assert check(build_work_list([1, 2, 5, 1], [9, 5, 100, 0], first_row=1, group_size=2, block_m=8))
