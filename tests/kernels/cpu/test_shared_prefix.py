"""Decode rows that read the same leading blocks: found, processed together, and with unchanged bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels.cpu import operators as cpu
from pagemill.kernels.cpu.attention import decode_tasks
from pagemill.kernels.cpu.attention.sharing import shared_blocks, sharing_of
from pagemill.kernels.types.layer_cache import LayerCache, largest_number
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring
from tests.kernels.paged_case import first_key

NO_BLOCK = 2**31 - 1  # an id outside every cache: reading it crashes
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Heads:
    num_kv_heads: int
    group: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """Decode rows by the length of their separate parts, in groups that start with the same blocks."""

    groups: list[
        tuple[int, list[int]]
    ]  # (tokens that the group shares, rounded down to complete blocks; separate tokens by row)
    common_tokens: int = 0  # before a group's shared part, and shared by all groups
    block_size: int = 16
    heads: Heads = field(default_factory=lambda: Heads(2, 3, 64))
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def tables(self) -> tuple[torch.Tensor, list[int]]:
        """Block tables [num_rows, any] in a random order of rows, and the rows' lengths."""
        draw = torch.Generator().manual_seed(self.seed)
        blocks = iter(torch.randperm(20_000, generator=draw).tolist())

        def take(num_tokens: int) -> list[int]:
            return [next(blocks) for _ in range(num_tokens // self.block_size)]

        rows: list[tuple[list[int], int]] = []
        common = take(self.common_tokens)
        for shared_tokens, own_tokens in self.groups:
            shared = common + take(shared_tokens)
            for own in own_tokens:
                table = shared + take(own + self.block_size - 1)
                rows.append((table, len(shared) * self.block_size + own))
        rows = [rows[i] for i in torch.randperm(len(rows), generator=draw).tolist()]
        tables = torch.full(
            (len(rows), max(len(table) for table, _ in rows) + 2), NO_BLOCK, dtype=torch.int32
        )
        used = sorted({block for table, _ in rows for block in table})
        number = {block: place for place, block in enumerate(used)}
        for row, (table, _) in zip(tables, rows, strict=True):
            row[: len(table)] = torch.tensor([number[block] for block in table])
        return tables, [length for _, length in rows]

    def step(self) -> Step:
        tables, lengths = self.tables()
        draw, heads = torch.Generator().manual_seed(self.seed), self.heads
        used = tables[tables != NO_BLOCK]
        shape = (int(used.max()) + 1, heads.num_kv_heads, self.block_size, heads.head_dim)

        def numbers() -> torch.Tensor:
            drawn = torch.randn(shape, generator=draw)
            return (
                (drawn * 40).clamp(-127, 127).to(self.dtype)
                if self.dtype.itemsize == 1
                else drawn.to(self.dtype)
            )

        scales = (
            [torch.rand(shape[:3], generator=draw) / 40 for _ in range(2)]
            if largest_number(self.dtype)
            else []
        )
        num_heads = heads.num_kv_heads * heads.group
        query = torch.randn(len(lengths), num_heads + 1, heads.head_dim, generator=draw)[:, 1:]
        metadata = AttentionMetadata(
            block_tables=tables,
            query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            slot_mapping=torch.full((len(lengths),), -1),
            query_lens_host=[1] * len(lengths),
            seq_lens_host=lengths,
            num_decode_rows=len(lengths),
            max_query_len=1,
            max_seq_len=max(lengths),
        )
        return Step(query, LayerCache(numbers(), numbers(), *scales), metadata)


@dataclass(frozen=True)
class Step:
    query: torch.Tensor
    cache: LayerCache
    metadata: AttentionMetadata

    def attend(self, scoring: Scoring, *, together: bool) -> torch.Tensor:
        metadata = replace(self.metadata)
        if not together:
            metadata.sharing = torch.empty(0, dtype=torch.int32)
        return cpu.paged_attention(self.query, self.cache, metadata, scoring)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run operators on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tasks_of(step: Step, window: int = 0, group: int = 3, num_kv_heads: int = 1) -> np.ndarray:
    """Return the kernel's tasks: rows of `decode_tasks`' columns."""
    lengths, num_rows = step.metadata.seq_lens, len(step.metadata.seq_lens)
    rows, order = np.empty((num_rows, 3), np.int64), np.empty((num_rows, 2), np.int64)
    num_splits, _ = decode_tasks.plan_rows(rows, lengths.numpy(), num_rows, window)
    decode_tasks.plan_order(order, sharing_of(step.metadata), rows, num_rows, step.cache.block_size)
    most_rows = decode_tasks.most_rows_of_a_task(num_splits * num_kv_heads, group, 1)
    tasks, costs, largest = decode_tasks.plan_tasks(
        rows, order, num_rows, num_splits, num_kv_heads, most_rows
    )
    assert (np.diff(costs) > 0).all()
    assert largest == tasks[:, decode_tasks.COUNT].max()
    return tasks


HEADS = [Heads(2, 3, 64), Heads(1, 4, 128), Heads(3, 1, 24), Heads(1, 71, 16)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    own = st.lists(st.integers(1, 70), min_size=1, max_size=8)
    shared = st.one_of(st.integers(0, 80), st.sampled_from([255, 256, 257, 512, 530]))
    return Case(
        groups=draw(st.lists(st.tuples(shared, own), min_size=1, max_size=3)),
        common_tokens=draw(st.sampled_from([0, 0, 70, 300])),
        block_size=draw(st.sampled_from([1, 7, 16, 32, 80, 512])),
        heads=draw(st.sampled_from(HEADS)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def scorings(draw: st.DrawFn) -> dict[str, object]:
    return {
        "sliding_window": draw(st.sampled_from([None, None, 1, 40, 300, -1, -40, -256])),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "alibi": draw(st.booleans()),
        "sinks": draw(st.booleans()),
    }


def scoring_of(num_heads: int, *, alibi: bool = False, sinks: bool = False, **options) -> Scoring:
    slopes = torch.linspace(0.01, 0.5, num_heads) if alibi else None
    return Scoring(0.2, slopes, sinks=torch.linspace(-3.0, 6.0, num_heads) if sinks else None, **options)


@pytest.mark.slow
@settings(max_examples=50)
@given(cases(), scorings(), st.sampled_from([1, 2]))
def test_rows_get_the_bits_they_get_without_the_others(case: Case, options: dict, num_threads: int) -> None:
    step = case.step()
    scoring = scoring_of(step.query.shape[1], **options)
    with threads(num_threads):
        apart = step.attend(scoring, together=False)
        assert torch.isfinite(apart).all()
        assert torch.equal(step.attend(scoring, together=True), apart)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_many_rows_over_several_tasks_and_threads(dtype: torch.dtype) -> None:
    step = Case([(1000, list(range(1, 41)))], dtype=dtype).step()
    assert len(tasks_of(step)) < 4 * 40 // 3
    for num_threads in (1, 2):
        with threads(num_threads):
            together = step.attend(Scoring(0.2), together=True)
            assert torch.equal(together, step.attend(Scoring(0.2), together=False))


@pytest.mark.slow
@given(cases(), st.sampled_from([0, 1, 40, 300, -1, -40, -256]))
def test_tasks_cover_every_key_of_every_row_once(case: Case, window: int) -> None:
    step = case.step()
    size, tables = case.block_size, step.metadata.block_tables
    order = shared_blocks(tables.numpy())
    numbers = np.arange(len(tables)) if order is None else order[0]
    assert sorted(numbers.tolist()) == list(range(len(tables)))
    seen: set[tuple[int, int, int]] = set()
    for head, place, count, begin, shared_end in tasks_of(step, window, 3, 2).tolist():
        rows = numbers[place : place + count].tolist()
        assert count == 1 or shared_end - begin >= decode_tasks.FEWEST_KEYS
        for row in rows:
            length = int(step.metadata.seq_lens[row])
            end = min(length, begin // decode_tasks.SPLIT * decode_tasks.SPLIT + decode_tasks.SPLIT)
            keys = {(head, row, key) for key in range(begin, end)}
            assert not keys & seen
            assert keys
            seen |= keys
            blocks = slice(begin // size, -(-shared_end // size))
            assert shared_end <= end
            assert shared_end == begin or torch.equal(tables[row, blocks], tables[rows[0], blocks])
    visible = {
        (head, row, key)
        for head in range(2)
        for row, length in enumerate(step.metadata.seq_lens.tolist())
        for key in range(first_key(window, length - 1) if length else 0, length)
    }
    assert seen == visible


def test_rows_that_share_are_taken_together_wherever_they_stand() -> None:
    step = Case([(512, [5, 9, 20]), (256, [3, 60]), (0, [300])], common_tokens=0).step()
    taken = [(count, end - begin) for _, _, count, begin, end in tasks_of(step).tolist() if count > 1]
    assert sorted(taken) == [(2, 256), (3, 256), (3, 256)]


def test_a_few_shared_keys_are_left_alone() -> None:
    few = decode_tasks.FEWEST_KEYS - 16
    assert tasks_of(Case([(few, [30] * 5)]).step())[:, decode_tasks.COUNT].tolist() == [1] * 5
    assert tasks_of(Case([(few + 16, [30] * 5)]).step())[:, decode_tasks.COUNT].tolist() == [5]


def test_a_row_with_more_keys_of_its_own_than_it_shares_goes_alone() -> None:
    assert tasks_of(Case([(96, [96, 97])]).step())[:, decode_tasks.COUNT].tolist() == [1, 1]
    assert tasks_of(Case([(96, [96, 96])]).step())[:, decode_tasks.COUNT].tolist() == [2]


def test_blocks_that_windows_left_behind_are_alike_and_never_read() -> None:
    step, window = Case([(512, [300, 280, 5, 300])]).step(), 300
    for table, length in zip(step.metadata.block_tables, step.metadata.seq_lens.tolist(), strict=True):
        table[: (length - window) // 16] = NO_BLOCK
    assert sharing_of(step.metadata) != 0
    scoring = Scoring(0.2, sliding_window=window)
    assert torch.equal(step.attend(scoring, together=True), step.attend(scoring, together=False))


def test_rows_without_a_common_block_are_left_in_their_order() -> None:
    step = Case([(0, [40] * 9)]).step()
    assert sharing_of(step.metadata) == 0
    assert shared_blocks(np.zeros((0, 4), np.int32)) is None
    assert shared_blocks(np.zeros((1, 4), np.int32)) is None


def test_what_is_found_is_found_once_a_step() -> None:
    metadata = Case([(64, [5, 9]), (16, [3, 3, 40]), (0, [20, 20])]).step().metadata
    assert metadata.count_sharing_rows() == 0
    address = sharing_of(metadata)
    assert address == sharing_of(metadata) != 0
    assert metadata.count_sharing_rows() == 5
    assert replace(metadata).sharing is None  # can belong to other tables


@pytest.mark.slow
@given(cases())
def test_common_blocks_are_those_with_the_row_before(case: Case) -> None:
    tables = case.step().metadata.block_tables.numpy()
    found = shared_blocks(tables)
    repeated = len(set(tables[:, 0].tolist())) < len(tables)
    assert (found is not None) == repeated
    if found is None:
        return
    order, common = found.tolist()
    for place in range(1, len(order)):
        pair = tables[order[place - 1]], tables[order[place]]
        differs = np.flatnonzero(pair[0] != pair[1])
        assert common[place] == (differs[0] if len(differs) else tables.shape[1])
    if tables.shape[1] > 32:  # only some columns are sorted
        return
    # Of its common prefixes, a row keeps the longest: with one of its neighbors.
    for place, row in enumerate(order):
        equal = (tables == tables[row]).cumprod(axis=1).sum(axis=1)
        equal[row] = 0
        neighbours = [common[place], common[place + 1] if place + 1 < len(order) else 0]
        assert max(neighbours) == equal.max()
