"""The CPU version of paged attention and the cache writes, compared with a separate dense fp64 computation."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from pagemill.kernels.cpu import cache as cpu_cache
from pagemill.kernels.cpu import operators as cpu
from pagemill.kernels.cpu.attention import decode, prefill
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring
from tests.kernels.paged_case import first_key

NO_BLOCK = 2**31 - 1  # an id outside every cache: reading it crashes
SPLIT = 256  # keys; the split of the decode kernel, so that lengths around it cross the merge


pytestmark = pytest.mark.usefixtures("two_threads")


@dataclass
class Step:
    """A ragged batch whose caches hold NaN outside the rows' keys."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    keys: list[torch.Tensor]  # per row, [seq_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]
    new_keys: torch.Tensor  # [num_tokens, num_kv_heads, head_dim], this step's, a strided view
    new_values: torch.Tensor

    def attend(self, **options) -> torch.Tensor:
        scoring = Scoring(**{"scale": 0.2, **options})
        return cpu.paged_attention(self.query, self.cache, self.metadata, scoring)

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.key_cache, self.value_cache)


def make_step(
    rows: list[tuple[int, int]],  # (query_len, seq_len), decode rows first; seq_len 0 = padded
    *,
    group: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    num_padded_tokens: int = 0,
    seed: int = 42,
) -> Step:
    torch.manual_seed(seed)
    block_counts = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(block_counts) + 3
    free_blocks = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(rows), max(block_counts) + 2), NO_BLOCK, dtype=torch.int32)
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), math.nan)
    value_cache = key_cache.clone()
    # Packed like the output of a fused projection: query, key and value of a token side by side.
    num_heads = num_kv_heads * group
    num_tokens = sum(query_len for query_len, _ in rows) + num_padded_tokens
    packed = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, new_keys, new_values = packed.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    slots: list[int] = []
    keys, values = [], []
    for row, (query_len, seq_len) in enumerate(rows):
        row_keys, row_values = torch.randn(2, seq_len, num_kv_heads, head_dim)
        for index in range(block_counts[row]):
            tables[row, index] = free_blocks.pop()
        for position in range(seq_len):
            block, offset = int(tables[row, position // block_size]), position % block_size
            token = len(slots)
            if position >= seq_len - query_len:
                slots.append(block * block_size + offset)
                row_keys[position], row_values[position] = new_keys[token], new_values[token]
            key_cache[block, :, offset] = row_keys[position]
            value_cache[block, :, offset] = row_values[position]
        slots += [-1] * (query_len - min(query_len, seq_len))
        keys.append(row_keys)
        values.append(row_values)
    slots += [-1] * num_padded_tokens
    query_lens = [query_len for query_len, _ in rows]
    seq_lens = [seq_len for _, seq_len in rows]
    metadata = AttentionMetadata(
        block_tables=tables,
        query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        num_decode_rows=sum(1 for _ in itertools.takewhile(lambda n: n == 1, query_lens)),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return Step(query, key_cache, value_cache, metadata, keys, values, new_keys, new_values)


def dense(
    step: Step, *, scale=0.2, alibi_slopes=None, sliding_window=None, softcap=None, sinks=None
) -> torch.Tensor:
    """Token by token and head by head, in fp64."""
    num_tokens, num_heads, head_dim = step.query.shape
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    group = num_heads // step.key_cache.shape[1]
    token = 0
    lens = zip(step.metadata.query_lens_host, step.metadata.seq_lens_host, strict=True)
    for row, (query_len, seq_len) in enumerate(lens):
        for i in range(seq_len - query_len, seq_len) if seq_len else ():
            first = first_key(sliding_window, i)
            keys = step.keys[row][first : i + 1].double().repeat_interleave(group, dim=1)
            values = step.values[row][first : i + 1].double().repeat_interleave(group, dim=1)
            query = step.query[token + i - (seq_len - query_len)].double()
            scores = torch.einsum("hd,khd->hk", query, keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                origin = 0 if sinks is None else i
                scores += alibi_slopes.double()[:, None] * (torch.arange(first, i + 1) - origin)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
            weights = scores.softmax(-1)[:, : len(keys)]
            out[token + i - (seq_len - query_len)] = torch.einsum("hk,khd->hd", weights, values)
        token += query_len
    return out


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


EDGES = [1, 2, 15, 16, 17, 31, 32, 33, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1, 700]
MIXED = [(1, 5), (1, 300), (1, 16), (7, 7), (16, 40), (33, 33), (2, 290)]
SINKS = torch.tensor([-200.0, -2.0, 0.0, 2.0, 8.0, 200.0])  # the last one leaves no weight for the values
BIASES = {
    "plain": {},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.015])},
    "window": {"sliding_window": 20},
    "window of one": {"sliding_window": 1},
    "long window": {"sliding_window": 270},
    "chunks": {"sliding_window": -20},
    "chunks of one": {"sliding_window": -1},
    "long chunks": {"sliding_window": -128, "sinks": SINKS},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "all": {
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.015]),
        "sliding_window": 37,
        "softcap": 2.0,
        "sinks": SINKS,
    },
}


@pytest.mark.parametrize("block_size", [1, 7, 8, 16, 32, 80, 100, 512])
def test_decode_at_block_and_split_edges(block_size):
    step = make_step([(1, n) for n in EDGES], block_size=block_size)
    assert_exact(step.attend(), dense(step))


@pytest.mark.parametrize("group", [1, 3, 7, 16, 48, 71])
def test_group_sizes(group):
    step = make_step([(1, 40), (1, 300), (5, 21)], group=group)
    assert_exact(step.attend(), dense(step))


@pytest.mark.parametrize("head_dim", [4, 24, 64, 80, 96, 128, 256])
def test_head_dims(head_dim):
    step = make_step([(1, 40), (1, 300), (5, 21)], head_dim=head_dim)
    assert_exact(step.attend(), dense(step))


@pytest.mark.parametrize("options", BIASES.values(), ids=BIASES.keys())
def test_mixed_batch_under_every_bias(options):
    step = make_step(MIXED)
    assert_exact(step.attend(**options), dense(step, **options))


def test_a_window_never_reads_the_blocks_before_it():
    step = make_step([(1, 100), (1, 600), (4, 90)])
    tables = step.metadata.block_tables
    tables[0, : (100 - 20) // 16] = NO_BLOCK
    tables[1, : (600 - 20) // 16] = NO_BLOCK
    tables[2, : (90 - 3 - 20) // 16] = NO_BLOCK
    assert_exact(step.attend(sliding_window=20), dense(step, sliding_window=20))


def test_a_chunk_never_reads_the_blocks_before_it():
    step = make_step([(1, 97), (1, 600), (4, 98), (40, 130)])
    tables = step.metadata.block_tables
    tables[0, : 96 // 16] = NO_BLOCK
    tables[1, : 576 // 16] = NO_BLOCK
    tables[2, : 48 // 16] = NO_BLOCK
    tables[3, : 48 // 16] = NO_BLOCK
    assert_exact(step.attend(sliding_window=-48), dense(step, sliding_window=-48))


def test_large_scores_do_not_overflow():
    step = make_step([(1, 300), (3, 300)])
    # Scores near 1000 have rounding errors of 1e-4.
    torch.testing.assert_close(
        step.attend(scale=40.0).double(), dense(step, scale=40.0), rtol=1e-3, atol=1e-3
    )


def test_padded_rows_and_tokens_leave_the_others_alone():
    step = make_step([(1, 33), (1, 0), (1, 0)], num_padded_tokens=2)
    assert_exact(step.attend()[:1], dense(step)[:1])
    step = make_step([(1, 33), (6, 20), (0, 0), (0, 0)], num_padded_tokens=2)
    assert_exact(step.attend()[:7], dense(step)[:7])


def test_a_decode_row_does_not_depend_on_its_neighbours_or_the_threads():
    rows = [(1, 40), (1, 777), (1, 256), (1, 5)]
    step = make_step(rows)
    together = step.attend()
    for row, (_, seq_len) in enumerate(rows):
        metadata = AttentionMetadata(
            block_tables=step.metadata.block_tables[row : row + 1],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=step.metadata.seq_lens[row : row + 1],
            slot_mapping=step.metadata.slot_mapping[row : row + 1],
            query_lens_host=[1],
            seq_lens_host=[seq_len],
            num_decode_rows=1,
            max_query_len=1,
            max_seq_len=seq_len,
        )
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            alone = cpu.paged_attention(step.query[row : row + 1], step.cache, metadata, Scoring(0.2))
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 50}], ids=["plain", "window"])
def test_a_prompt_cut_into_chunks_gives_the_same_bits(options):
    step = make_step([(290, 290)])
    whole = step.attend(**options)
    for begin, end in [(0, 7), (7, 71), (71, 200), (200, 202), (202, 290)]:
        metadata = AttentionMetadata(
            block_tables=step.metadata.block_tables,
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            slot_mapping=step.metadata.slot_mapping[begin:end],
            query_lens_host=[end - begin],
            seq_lens_host=[end],
            num_decode_rows=0,
            max_query_len=end - begin,
            max_seq_len=end,
        )
        chunk = cpu.paged_attention(step.query[begin:end], step.cache, metadata, Scoring(0.2, **options))
        assert torch.equal(chunk, whole[begin:end])


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("block_size", [16, 48, 512])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 100}, {"softcap": 5.0}], ids=["plain", "window", "cap"]
)
def test_rows_that_share_blocks_get_the_bits_they_get_alone(options, block_size, head_dim):
    """The panels of shared keys are gathered once, by block numbers; a row that diverges earlier must not see them."""
    lengths = [(70, 700), (50, 700), (9, 650), (3, 90), (60, 60), (5, 699), (2, 1300)]
    step = make_step(lengths, block_size=block_size, head_dim=head_dim)
    tables = step.metadata.block_tables
    for row, shared in ((1, 512), (2, 640), (3, 64), (4, 48), (6, 513)):
        tables[row, : shared // block_size] = tables[row - 1, : shared // block_size]
    together = step.attend(**options)
    starts = step.metadata.query_start_loc
    for row in range(len(lengths)):
        first, last = int(starts[row]), int(starts[row + 1])
        metadata = replace(
            step.metadata,
            block_tables=tables[row : row + 1],
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=step.metadata.seq_lens[row : row + 1],
            query_lens_host=[last - first],
            seq_lens_host=[lengths[row][1]],
        )
        scoring = Scoring(0.2, **options)
        alone = cpu.paged_attention(step.query[first:last], step.cache, metadata, scoring)
        assert torch.isfinite(alone).all()
        assert torch.equal(together[first:last], alone)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 33}], ids=["plain", "window"])
def test_what_is_not_finite_stays_in_its_row(options):
    """The memory for a row's gathered keys and values is reused for the next one, whose tiles may not fill it."""
    torch.set_num_threads(1)
    lengths = [(130, 130), (5, 37), (20, 90), (2, 75)]
    step = make_step(lengths)
    sound = step.attend(**options)
    poisoned = step.metadata.block_tables[0, : -(-130 // 16)].long()
    step.key_cache[poisoned], step.value_cache[poisoned] = math.nan, math.inf
    assert torch.equal(step.attend(**options)[130:], sound[130:])
    assert not step.attend(**options)[:130].isfinite().any()


@pytest.mark.parametrize("options", BIASES.values(), ids=BIASES.keys())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_query_or_key_that_is_not_finite_makes_no_numbers(bad, options):
    """An overflow in an earlier matmul, such as an adapter's: finite outputs would hide it."""
    step = make_step([(1, 40), (1, 700), (1, 9), (30, 60), (5, 300)])
    expected = step.attend(**options)
    for token in (1, 10):
        step.query[token, 0] = bad
    spoiled = step.attend(**options)
    for token in (1, 10):
        assert not spoiled[token, 0].isfinite().any()
        spoiled[token, 0] = expected[token, 0]
    assert torch.equal(spoiled, expected), "the others keep their bits"
    step = make_step([(1, 40), (30, 30)])
    for row, position in ((0, 39), (1, 7)):
        block = int(step.metadata.block_tables[row, position // 16])
        step.key_cache[block, :, position % 16] = math.nan
    spoiled = step.attend(**options)
    assert spoiled[1:8].isfinite().all()
    assert not spoiled[[0, 8]].isfinite().any()


@pytest.mark.slow
def test_a_long_prompt_reads_more_keys_than_panels_are_held_of():
    step = make_step([(40, 1500), (333, 2100)], head_dim=128)
    assert_exact(step.attend(), dense(step))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_caches(dtype):
    step = make_step(MIXED)
    step.query, step.key_cache, step.value_cache = (
        x.to(dtype) for x in (step.query, step.key_cache, step.value_cache)
    )
    actual = step.attend()
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), dense(step), rtol=0.05, atol=0.05)


def test_reshape_and_cache_writes_the_slots_and_nothing_else():
    step = make_step(MIXED, num_padded_tokens=3)
    key_cache, value_cache = step.key_cache.clone(), step.value_cache.clone()
    slots = step.metadata.slot_mapping
    for cache in (key_cache, value_cache):
        for slot in slots[slots >= 0].tolist():
            cache[slot // 16, :, slot % 16] = -7.0
    cpu.reshape_and_cache(step.new_keys, step.new_values, LayerCache(key_cache, value_cache), slots)
    torch.testing.assert_close(key_cache, step.key_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(value_cache, step.value_cache, rtol=0, atol=0, equal_nan=True)


def test_copy_blocks():
    key_cache, value_cache = torch.randn(2, 8, 2, 16, 64)
    expected_keys, expected_values = key_cache.clone(), value_cache.clone()
    for source, destination in [(1, 5), (1, 6), (7, 0)]:
        expected_keys[destination], expected_values[destination] = key_cache[source], value_cache[source]
    cpu.copy_blocks(key_cache, value_cache, [(1, 5), (1, 6), (7, 0)])
    cpu.copy_blocks(key_cache, value_cache, [])
    assert torch.equal(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)


def test_after_the_warm_up_no_step_compiles():
    kernels = [
        decode.decode, prefill.prefill, cpu_cache.write_tokens, cpu_cache.write_tokens_parallel,
    ]  # fmt: skip
    cpu.warm_up_layers(num_heads=6, num_kv_heads=2, head_dim=64, block_size=16)
    compiled = [len(kernel.signatures) for kernel in kernels]
    step = make_step([*MIXED[:3], (200, 290)])
    for options in BIASES.values():
        step.attend(**options)
    cpu.reshape_and_cache(step.new_keys, step.new_values, step.cache, step.metadata.slot_mapping)
    assert [len(kernel.signatures) for kernel in kernels] == compiled


@pytest.mark.slow
def test_kernels_compile_where_nothing_can_be_cached():
    script = (
        "import torch; from pagemill.kernels.cpu import operators as cpu;"
        "from pagemill.kernels.types.layer_cache import LayerCache;"
        "cache = torch.zeros(2, 1, 1, 4, 16); layer = LayerCache(*cache);"
        "x = torch.ones(1, 1, 16); cpu.reshape_and_cache(x, x, layer, torch.tensor([2]));"
        "assert cache[:, 0, 0, 2].eq(1).all()"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": "/dev/null/nowhere"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.slow
def test_the_number_of_threads_stays_torchs():
    script = (
        "import torch; torch.set_num_threads(1); from pagemill.kernels.cpu import operators as cpu;"
        "cpu.warm_up(); cpu.warm_up_layers(num_heads=2, num_kv_heads=1, head_dim=16, block_size=4);"
        "import numba; assert (torch.get_num_threads(), numba.get_num_threads()) == (1, 1)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_huge_pages_are_advice_only():
    tensor = torch.empty(3_000_001)
    cpu.advise_huge_pages(tensor)
    assert tensor.fill_(1.0).sum() == 3_000_001
    assert not cpu.advise_huge_pages(torch.empty(1))


def test_partial_results_live_until_they_are_merged() -> None:
    """More than 32 MiB: glibc returns such pages as soon as they are freed."""
    step = make_step([(1, 1100)] * 6, group=512, num_kv_heads=1, head_dim=576)
    merged = step.attend(scale=0.05)
    step.metadata.num_decode_rows = 0  # the other kernel does not have partial results
    torch.testing.assert_close(merged, step.attend(scale=0.05), rtol=1e-5, atol=1e-5)
