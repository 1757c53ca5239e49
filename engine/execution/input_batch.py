"""Persistent rows: execution's state of every running sequence, and a step's tensors made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pagemill.engine.execution.media_encoder import MediaEncoder
from pagemill.engine.execution.staging import Transfer
from pagemill.engine.execution.state_pool import StatePool
from pagemill.engine.layers.media_step import MediaStep
from pagemill.engine.media import MediaItem
from pagemill.engine.plan import NewRow, StepPlan
from pagemill.kernels.types.low_rank import NO_ADAPTER, AdapterRows, tiled
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.recurrent import RecurrentStep, StateRows

NULL_BLOCK = 0
IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64, for rotation
    logits_indices: torch.Tensor  # [num_samples] int64, into the step's tokens
    sample_rows: torch.Tensor  # [num_samples] int64
    sample_positions: torch.Tensor  # [num_samples] int64, the tokens' places in their rows
    metadata: AttentionMetadata
    adapters: AdapterRows | None = None  # None: no token has one
    reads: tuple[torch.Tensor, torch.Tensor] | None = None
    """The plan's reads. [num_reads] int64: the step's tokens whose logits are read; and [2, num_pairs] int64:
    (index of the read, token id) of each log probability. None: the plan has none."""
    media: MediaStep | None = None
    """None: all tokens use their own embeddings and have one position each."""


@dataclass(frozen=True, slots=True)
class Insert:
    """Vectors of an item that a step reads: first..end-1 of `num_vectors`."""

    item: MediaItem
    num_vectors: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _StagedMedia:
    """A step's changes due to rows with media."""

    inserts: list[Insert]
    tokens: torch.Tensor  # [num_vectors] int64: the step's tokens that vectors replace
    positions: (
        torch.Tensor | None
    )  # [num_tokens] or [3, num_tokens] int64: rotary ones; None: indexes in the sequence


@dataclass(slots=True)
class _StagedStep:
    """A step's arrays, on the device once sent, and their sizes known on the host."""

    entered: list[tuple[int, torch.Tensor, torch.Tensor]]  # row, token ids, block ids
    blocks: torch.Tensor | None  # [3, n] int64: row, column, block id
    forced: torch.Tensor | None  # [3, n] int64: row, position, token id
    rows: torch.Tensor  # [num_rows] int64
    token_rows: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    query_starts: torch.Tensor  # [padded_rows + 1] int32
    seq_lens: torch.Tensor  # [padded_rows] int32
    samples: torch.Tensor  # [3, num_samples] int64: index of the token, row, position
    query_lens_host: list[int]
    seq_lens_host: list[int]
    num_padded_tokens: int
    num_decode_rows: int
    adapters: AdapterRows | None
    state_rows: list[StateRows] | None
    reads: tuple[torch.Tensor, torch.Tensor] | None
    media: _StagedMedia | None


def bucket_size(count: int) -> int:
    """Return the padded size for `count` rows or tokens: 1, 2, 4, then multiples of 8, as for CUDA graphs."""
    if count <= 2:
        return count
    return 4 if count <= 4 else -(-count // 8) * 8


class InputBatch:
    """Row tables on the device (token ids, block ids), with host-only data in addition to them.

    A row belongs to one sequence from the step with its `NewRow` until the row is assigned to another.
    Sampling writes tokens into the token table, so it contains a row's next input before the host has it.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        pad_to_bucket: bool,
        transfer: Transfer,
        split_decodes: bool = True,
        num_groups: int = 1,
        states: StatePool | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        """`split_decodes`: rows with one token use a separate attention kernel, which is faster and sums in
        another order than the one for prompts. `num_groups`: groups of layers with their own block tables.
        `states`: of the model's recurrent layers; None: it has none. `encoder`: None: no sequence has media."""
        self._num_groups = num_groups
        self._states = states
        self._block_size = block_size
        self._pad = pad_to_bucket
        self._split_decodes = split_decodes
        self._transfer = transfer
        max_blocks = -(-max_model_len // block_size) * num_groups
        # One extra column: the last token of a full context is sampled, though never computed.
        self.token_table = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self.block_table = torch.full(
            (max_num_seqs, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device
        )
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._adapter_slots = np.full(max_num_seqs, NO_ADAPTER, dtype=np.int32)
        self.rows: list[NewRow | None] = [None] * max_num_seqs
        self._num_media = 0
        """Rows whose latest sequence has media."""
        self._encoder = encoder

    def row(self, number: int) -> NewRow:
        """Return the row's latest `NewRow`."""
        row = self.rows[number]
        assert row is not None, "work for a row that nothing entered"
        return row

    def stage(self, plan: StepPlan, *, pad: bool = False) -> _StagedStep:
        """Add the step's arrays to the transfer; call `lay_out` once they are sent.

        Args:
            pad: pad to a bucket, even if the batch does not always do so.
        """
        if self._num_media:
            self._drop_media(plan.freed_rows)
        entered = [self._enter(new_row) for new_row in plan.new_rows]
        blocks, forced = self._table_changes(plan)
        num_rows, num_tokens = len(plan.work), plan.num_tokens
        pad = pad or self._pad
        padded_rows = bucket_size(num_rows) if pad else num_rows
        padded_tokens = bucket_size(num_tokens) if pad else num_tokens
        padded_tokens = max(padded_tokens, num_tokens + (padded_rows - num_rows))

        rows = np.fromiter((work.row for work in plan.work), np.int64, num_rows)
        starts = np.fromiter((work.start for work in plan.work), np.int64, num_rows)
        query_lens = np.fromiter((work.num_tokens for work in plan.work), np.int64, num_rows)
        query_starts = np.zeros(padded_rows + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_starts[1 : num_rows + 1])
        query_starts[num_rows + 1 :] = num_tokens
        seq_lens = np.zeros(padded_rows, dtype=np.int32)
        seq_lens[:num_rows] = starts + query_lens
        positions = np.arange(num_tokens) - np.repeat(query_starts[:num_rows] - starts, query_lens)
        num_decode_rows = int((query_lens == 1).sum()) if self._split_decodes else 0
        if num_decode_rows == num_rows:
            num_decode_rows = padded_rows  # a padded row points to its own padded token
        samples = [(sample.token_index, sample.row, sample.position) for sample in plan.samples]
        put = self._transfer.put
        return _StagedStep(
            entered,
            blocks,
            forced,
            rows=put(rows),
            token_rows=put(np.repeat(rows, query_lens)),
            positions=put(positions),
            query_starts=put(query_starts),
            seq_lens=put(seq_lens),
            samples=put(np.array(samples, dtype=np.int64).reshape(-1, 3).T),
            query_lens_host=[*query_lens.tolist(), *([0] * (padded_rows - num_rows))],
            seq_lens_host=seq_lens.tolist(),
            num_padded_tokens=padded_tokens,
            num_decode_rows=num_decode_rows,
            adapters=self._stage_adapters(rows, query_lens, padded_tokens) if plan.has_adapters else None,
            state_rows=None if self._states is None else self._stage_state_rows(plan, rows, query_lens),
            reads=self._stage_reads(plan, query_starts),
            media=self._stage_media(plan, query_starts, positions) if self._num_media else None,
        )

    def _stage_media(
        self, plan: StepPlan, query_starts: npt.NDArray[np.int32], positions: IntArray
    ) -> _StagedMedia | None:
        """Return the vectors and positions of rows with media; None if the step does not involve media."""
        inserts: list[Insert] = []
        tokens: list[IntArray] = []
        rotary: IntArray | None = None
        for work, begin in zip(plan.work, query_starts.tolist(), strict=False):
            if (media := self.row(work.row).media) is None:
                continue
            end = work.start + work.num_tokens
            for item, places in zip(media.items, media.places, strict=True):
                first, last = np.searchsorted(places, (work.start, end)).tolist()
                if first < last:
                    inserts.append(Insert(item, len(places), first, last))
                    tokens.append(places[first:last] + (begin - work.start))
            if media.positions is not None:
                rotary = np.tile(positions, (3, 1)) if rotary is None else rotary
                own = media.positions[:, work.start : end]
                rotary[:, begin : begin + own.shape[1]] = own
                rotary[:, begin + own.shape[1] : begin + work.num_tokens] += media.shift
        if not inserts and rotary is None:
            return None
        if rotary is not None and (rotary == rotary[0]).all():
            rotary = rotary[0]
        put = self._transfer.put
        indexes = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
        return _StagedMedia(inserts, put(indexes), None if rotary is None else put(rotary))

    def _stage_reads(
        self, plan: StepPlan, query_starts: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `StepInputs.reads`."""
        reads = [
            (int(begin), *read)
            for work, begin in zip(plan.work, query_starts, strict=False)
            for read in work.reads
        ]
        if not reads:
            return None
        tokens = np.array([begin + place for begin, place, _ in reads], dtype=np.int64)
        pairs = [(number, token) for number, (_, _, ids) in enumerate(reads) for token in ids]
        put = self._transfer.put
        return put(tokens), put(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)

    def _stage_adapters(self, rows: IntArray, lengths: IntArray, padded_tokens: int) -> AdapterRows:
        slots = np.full(padded_tokens, NO_ADAPTER, dtype=np.int32)
        of_tokens = np.repeat(self._adapter_slots[rows], lengths)
        slots[: len(of_tokens)] = of_tokens
        put = self._transfer.put
        return AdapterRows(put(slots), *(put(array) for array in tiled(slots)))

    def _stage_state_rows(self, plan: StepPlan, rows: IntArray, lengths: IntArray) -> list[StateRows]:
        """Divide the step's rows into groups that a recurrent layer computes together."""
        begins = np.cumsum(lengths) - lengths
        kinds: dict[tuple[int, bool], list[int]] = {}
        for number, work in enumerate(plan.work):
            kinds.setdefault((work.num_tokens, work.start == 0), []).append(number)
        staged = []
        for (length, is_new), numbers in kinds.items():
            places = (begins[numbers][:, None] + np.arange(length)).reshape(-1)
            first, end = int(places[0]), int(places[-1]) + 1
            tokens = slice(first, end) if end - first == len(places) else self._transfer.put(places)
            chosen = rows[numbers]
            adapters = row_adapters = None
            if plan.has_adapters:
                once = np.ones(len(chosen), dtype=np.int64)
                adapters = self._stage_adapters(chosen, once * length, len(places))
                row_adapters = self._stage_adapters(chosen, once, len(chosen))
            slots = self._transfer.put(chosen)
            staged.append(StateRows(tokens, length, slots, is_new, adapters, row_adapters))
        return staged

    def lay_out(self, staged: _StagedStep) -> StepInputs:
        """Update the tables and build the step's tensors, entirely on the device."""
        for row, tokens, blocks in staged.entered:
            self.token_table[row, : len(tokens)] = tokens
            self.block_table[row, : len(blocks)] = blocks
        if staged.blocks is not None:
            self.block_table[staged.blocks[0], staged.blocks[1]] = staged.blocks[2].to(torch.int32)
        if staged.forced is not None:
            self.token_table[staged.forced[0], staged.forced[1]] = staged.forced[2]
        positions = staged.positions
        input_ids = self.token_table[staged.token_rows, positions]
        max_seq_len = max(staged.seq_lens_host, default=1)
        max_blocks = -(-max(1, max_seq_len) // self._block_size)
        by_group = [self._tables_and_slots(staged, group, max_blocks) for group in range(self._num_groups)]
        media = staged.media
        if media is not None and media.positions is not None:
            positions = media.positions
        extra = staged.num_padded_tokens - len(input_ids)
        if extra:
            input_ids = torch.nn.functional.pad(input_ids, (0, extra))
            positions = torch.nn.functional.pad(positions, (0, extra))
        metadata = AttentionMetadata(
            *by_group[0],
            query_start_loc=staged.query_starts,
            seq_lens=staged.seq_lens,
            query_lens_host=staged.query_lens_host,
            seq_lens_host=staged.seq_lens_host,
            num_decode_rows=staged.num_decode_rows,
            max_query_len=max(staged.query_lens_host, default=1),
            max_seq_len=max(1, max_seq_len),
        )
        if self._states is not None and staged.state_rows is not None:
            metadata.recurrent = RecurrentStep(self._states.layers, staged.state_rows)
        metadata.others = [
            replace(metadata, block_tables=tables, slot_mapping=slots, others=[])
            for tables, slots in by_group[1:]
        ]
        of_axes = positions if positions.ndim == 2 else None
        media_step = None
        if media is not None and (media.inserts or of_axes is not None):
            assert self._encoder is not None
            media_step = self._encoder.step(media.inserts, media.tokens, of_axes)
        return StepInputs(
            input_ids,
            positions if of_axes is None else of_axes[0],
            logits_indices=staged.samples[0],
            sample_rows=staged.samples[1],
            sample_positions=staged.samples[2],
            metadata=metadata,
            adapters=staged.adapters,
            reads=staged.reads,
            media=media_step,
        )

    def _tables_and_slots(
        self, staged: _StagedStep, group: int, max_blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a group's block tables and slot mapping, padded."""
        positions = staged.positions
        table = self.block_table[:, group :: self._num_groups]
        tables = table[:, :max_blocks].index_select(0, staged.rows)
        columns = positions // self._block_size
        blocks = table[staged.token_rows, columns]
        # The block's first slot, plus the offset in it.
        slots = torch.add(positions, blocks - columns, alpha=self._block_size)
        if extra := staged.num_padded_tokens - len(positions):
            slots = torch.nn.functional.pad(slots, (0, extra), value=-1)
            padding = (0, 0, 0, len(staged.seq_lens) - len(staged.rows))
            tables = torch.nn.functional.pad(tables, padding, value=NULL_BLOCK)
        return tables, slots

    def _drop_media(self, rows: Sequence[int]) -> None:
        """Free the arrays of sequences that have left these rows."""
        for number in rows:
            if (row := self.rows[number]) is not None and row.media is not None:
                row.media = None
                self._num_media -= 1

    def _enter(self, new: NewRow) -> tuple[int, torch.Tensor, torch.Tensor]:
        if (previous := self.rows[new.row]) is not None and previous.media is not None:
            self._num_media -= 1
        self._num_media += new.media is not None
        self.rows[new.row] = new
        self._num_blocks[new.row] = len(new.block_ids)
        self._adapter_slots[new.row] = new.adapter_slot
        tokens = self._transfer.put(np.array(new.token_ids, dtype=np.int64))
        return new.row, tokens, self._transfer.put(np.array(new.block_ids, dtype=np.int32))

    def _table_changes(self, plan: StepPlan) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `_StagedStep`'s (blocks appended or replaced, tokens forced by a grammar or a search)."""
        blocks: list[tuple[int, int, int]] = []
        forced: list[tuple[int, int, int]] = []
        for work in plan.work:
            if work.replaced_blocks:
                blocks += [(work.row, column, block_id) for column, block_id in work.replaced_blocks]
            if work.new_block_ids:
                first = int(self._num_blocks[work.row])
                blocks += [
                    (work.row, first + offset, block) for offset, block in enumerate(work.new_block_ids)
                ]
                self._num_blocks[work.row] += len(work.new_block_ids)
            if work.forced_token_ids:
                forced += [(work.row, position, token) for position, token in work.forced_token_ids]
        return self._put_triples(blocks), self._put_triples(forced)

    def _put_triples(self, triples: list[tuple[int, int, int]]) -> torch.Tensor | None:
        if not triples:
            return None
        columns: npt.NDArray[np.int64] = np.array(triples, dtype=np.int64).T
        return self._transfer.put(columns)
