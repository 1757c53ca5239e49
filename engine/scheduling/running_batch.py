"""The sequences that hold rows: how they enter, grow, fork, and lose their row when blocks run out."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.outputs import WaitReason
from engine.scheduling.kv_cache_manager import AllocatedSlots, KVCacheManager
from engine.scheduling.request import Sequence, SequenceStatus
from engine.scheduling.sequence_queue import SequenceQueue
from engine.scheduling.step_builder import StepBuilder


class RunningBatch:
    """Rows, and the sequences in them.

    A request whose n samples start out equal enters as one sequence, its leader, which prefills the prompt;
    n - 1 rows stay claimed for the siblings, which fork off in the step that completes it. Claiming them at
    admission keeps two half-admitted requests from waiting for each other's rows.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.sequences = SequenceQueue()
        self.preemptions = 0
        self.preempted_tokens = 0
        self.waiting_for: WaitReason = "budget"
        """What the sequence that was last refused lacked."""
        self._config = config
        self._kv = kv
        self._watermark_blocks = int((config.num_kv_blocks - 1) * config.watermark_ratio)
        self._siblings: dict[Sequence, list[Sequence]] = {}
        """Leader -> the siblings that will fork off it."""
        self._free_rows = list(range(config.max_num_seqs))
        self._freed_rows: set[int] = set()
        """Rows left since the last plan."""

    @property
    def num_unclaimed_rows(self) -> int:
        return len(self._free_rows) - sum(map(len, self._siblings.values()))

    @property
    def num_admissible_blocks(self) -> int:
        """Available blocks, less the watermark."""
        return max(0, self._kv.pool.num_available - self._watermark_blocks)

    def schedule(self, step: StepBuilder, candidates: Iterable[Sequence]) -> list[Sequence]:
        """Add what the budget allows of these running sequences, in order; returns those preempted."""
        preempted: list[Sequence] = []
        for sequence in list(candidates):
            if not step.budget:
                break
            if sequence.row is None:
                continue
            num_tokens = self._num_plannable(sequence, step.budget)
            if not num_tokens or (step.is_short and self._kv.num_blocks_needed(sequence, num_tokens)):
                continue
            slots = self._kv.allocate_slots(sequence, num_tokens, step.step_id)
            if slots is None:
                slots = self._make_room(step, sequence, num_tokens, preempted)
            if slots is not None:
                self._plan(step, sequence, num_tokens, slots)
        return preempted

    def admit(self, step: StepBuilder, sequence: Sequence, siblings: list[Sequence]) -> bool:
        """Give a waiting sequence a row, its prefix hits and its first chunk. False: not now.

        Admission asks for room for all known tokens, not just the chunk, and for one own block per sibling,
        above the watermark. Alone, whatever is there must do.
        """
        if sequence.num_pending_tokens or self.num_unclaimed_rows < 1 + len(siblings):
            self.waiting_for = "rows"
            return False
        hits = self._kv.match_prefix(sequence)
        num_hit_tokens = len(hits) * self._config.block_size
        num_tokens = self._chunk(sequence.num_known_tokens - num_hit_tokens, step.budget)
        available = self._kv.pool.num_available
        if self.sequences:
            needed = self._kv.num_blocks_taken(hits, sequence.num_known_tokens) + len(siblings)
            available -= step.promised_blocks + self._watermark_blocks
        else:
            needed = self._kv.num_blocks_taken(hits, num_hit_tokens + num_tokens)
        if needed > available:
            self.waiting_for = "kv"
            return False
        self._kv.admit(sequence, hits)
        request = sequence.request
        if not request.was_admitted:
            request.was_admitted = True
            request.admitted_at = time.monotonic()
            request.num_cached_tokens = min(num_hit_tokens, sequence.num_prompt_tokens)
        if siblings:
            self._siblings[sequence] = siblings
        self._enter(step, sequence)
        slots = self._kv.allocate_slots(sequence, num_tokens, step.step_id)
        assert slots is not None, "admission counted the blocks wrongly"
        self._plan(step, sequence, num_tokens, slots)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's row and blocks; what it knows stays."""
        assert sequence.row is not None
        request = sequence.request
        request.peak_blocks = max(request.peak_blocks, sum(len(s.block_ids) for s in request.sequences))
        self._kv.free(sequence)
        self._siblings.pop(sequence, None)
        self.sequences.discard(sequence)
        heapq.heappush(self._free_rows, sequence.row)
        self._freed_rows.add(sequence.row)
        sequence.row = None
        sequence.forced_token_ids = []
        sequence.status = SequenceStatus.WAITING

    def forget_sibling(self, sequence: Sequence) -> None:
        """A sequence ended before it could fork off its leader."""
        for siblings in self._siblings.values():
            if sequence in siblings:
                siblings.remove(sequence)

    def is_sibling(self, sequence: Sequence) -> bool:
        return any(sequence in siblings for siblings in self._siblings.values())

    def mark_freed(self, rows: Iterable[int]) -> None:
        """Tell execution (again) that these rows are free, unless they are in use."""
        self._freed_rows.update(set(rows).intersection(self._free_rows))

    def take_freed_rows(self) -> list[int]:
        freed = sorted(self._freed_rows)
        self._freed_rows.clear()
        return freed

    def check_integrity(self) -> None:
        rows = [sequence.row for sequence in self.sequences]
        assert None not in rows
        every_row = sorted([*(row for row in rows if row is not None), *self._free_rows])
        assert every_row == list(range(self._config.max_num_seqs)), (rows, self._free_rows)
        assert self.num_unclaimed_rows >= 0, "more rows are claimed than free"
        for leader, siblings in self._siblings.items():
            assert leader in self.sequences
            assert leader.num_computed_tokens < leader.num_tokens
            assert all(sibling.status is SequenceStatus.WAITING for sibling in siblings)

    def _num_plannable(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a running sequence can compute next."""
        known, pending = sequence.num_known_tokens, sequence.num_pending_tokens
        if pending and (sequence.grammar is not None or known + pending >= sequence.request.max_num_tokens):
            # A grammar needs the token itself; at the limit it is certain that none may follow.
            return 0
        return self._chunk(known + pending - sequence.num_computed_tokens, budget)

    def _chunk(self, num_tokens: int, budget: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        return min(num_tokens, budget, threshold) if threshold else min(num_tokens, budget)

    def _make_room(
        self, step: StepBuilder, sequence: Sequence, num_tokens: int, preempted: list[Sequence]
    ) -> AllocatedSlots | None:
        """Preempt from the end of the order until `sequence` fits. None: it was preempted itself, or it must
        wait for blocks that steps in flight still name.
        """
        pool = self._kv.pool
        step.is_short = True
        slots = None
        while slots is None:
            short = self._kv.num_blocks_needed(sequence, num_tokens) - pool.num_available
            if 0 < short <= pool.num_deferred:
                return None
            victim = self.sequences.last
            self.preemptions += 1
            self.preempted_tokens += victim.num_computed_tokens
            self.remove(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
            slots = self._kv.allocate_slots(sequence, num_tokens, step.step_id)
        return slots

    def _plan(self, step: StepBuilder, sequence: Sequence, num_tokens: int, slots: AllocatedSlots) -> None:
        """Add the work; fork the siblings if it reaches the prompt's last token."""
        step.add_work(sequence, num_tokens, slots)
        self._kv.register_full_blocks(sequence)
        if sequence.num_computed_tokens < sequence.num_tokens:
            needed = self._kv.blocks_for(sequence.num_known_tokens) - len(sequence.block_ids)
            step.promised_blocks += max(0, needed)
            return
        siblings = self._siblings.pop(sequence, None)
        if siblings is not None:
            for sibling in siblings:
                self._kv.fork(sequence, sibling)
                self._enter(step, sibling)
            assert sequence.row is not None
            step.add_siblings(sequence.row, siblings)

    def _enter(self, step: StepBuilder, sequence: Sequence) -> None:
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        self.sequences.add(sequence)
        step.add_row(sequence)
