"""The sequences that hold rows: how they enter, grow, fork, and lose their row when blocks run out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceType

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.outputs import WaitReason
from pagemill.engine.scheduling.drafter import Drafter
from pagemill.engine.scheduling.kv.manager import NO_NEW_SLOTS, AllocatedSlots, KVCacheManager
from pagemill.engine.scheduling.preemption import Preemption
from pagemill.engine.scheduling.request import Continuation, Request, Sequence, SequenceStatus
from pagemill.engine.scheduling.rows import RowTable
from pagemill.engine.scheduling.sequence_queue import SequenceQueue
from pagemill.engine.scheduling.step_builder import StepBuilder

Work = list[tuple[Sequence, int]]
"""Sequences and the number of tokens each must compute, all of them or none."""
NEARLY_DONE = 8
"""A row with this many tokens to go is not worth taking."""
MIN_PROGRESS = 16
"""Tokens between two displacements of a sequence."""


def is_urgent(sequence: Sequence) -> bool:
    """Return True if it may take rows from low requests, those of a priority above 0."""
    return sequence.request.priority < 0


def _may_be_displaced(sequence: Sequence) -> bool:
    request, known = sequence.request, sequence.num_known_tokens
    return (
        request.priority > 0
        and request.beam_search is None
        and request.labels is None
        and request.max_num_tokens - known > NEARLY_DONE
        and (sequence.displaced_at is None or known - sequence.displaced_at >= MIN_PROGRESS)
    )


class RunningBatch:
    """Adds running and waiting sequences to a step.

    A request whose n samples start out equal enters as one sequence, its leader, which prefills the prompt;
    the others fork off in the step that completes it. The beams of a search fork whenever one has several
    continuations; they are scheduled and preempted together.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.sequences = SequenceQueue()
        self.rows = RowTable(config.max_num_seqs)
        self.preemption = Preemption(config, kv)
        self.drafter = Drafter(config.num_speculative_tokens) if config.num_speculative_tokens else None
        self.waiting_for: WaitReason = "budget"
        """The resource that the most recently refused sequence lacked."""
        self.num_displaced = 0
        """Preemptions in favour of urgent requests."""
        self._config = config
        self._kv = kv
        self._watermark_blocks = int((config.num_kv_blocks - 1) * config.watermark_ratio)

    @property
    def num_admissible_blocks(self) -> int:
        """Available blocks, less the watermark."""
        return max(0, self._kv.pool.num_available - self._watermark_blocks)

    def schedule(self, step: StepBuilder, candidates: Iterable[Sequence]) -> list[Sequence]:
        """Add these running sequences in order, within the budget; returns those preempted."""
        preempted: list[Sequence] = []
        search: Request | None = None
        for sequence in list(candidates):
            if not step.budget:
                break
            if sequence.row is None:
                continue
            if self._schedule_newest(step, sequence):
                continue
            if sequence.request.beam_search is None:
                self._schedule_sequence(step, sequence, preempted)
            elif sequence.request is not search:
                search = sequence.request
                self._schedule_beams(step, search, preempted)
        return preempted

    def admit(self, step: StepBuilder, members: list[Sequence], siblings: list[Sequence]) -> bool:
        """Give a waiting sequence, or a swapped search's beams, rows, blocks and work. False: not now.

        Admission needs room for all known tokens, not just the chunk, and for one own column per sibling that
        will fork off later, above the watermark. A sequence alone in the batch may use everything.
        """
        is_pending = any(sequence.num_pending_tokens for sequence in members + siblings)
        if is_pending or self.rows.num_unclaimed < len(members) + len(siblings):
            self.waiting_for = "rows"
            return False
        if members[0].swapped_blocks:
            work = self._admit_swapped(step, members, len(siblings))
        else:
            (sequence,) = members
            work = self._admit_fresh(step, sequence, len(siblings))
        if not work:
            return False
        self.rows.claim(members[0].request, siblings)
        for sequence, _ in work:
            self.rows.take(sequence)
            self._enter(step, sequence)
        self._plan_all(step, work)
        return True

    def displace(self, members: list[Sequence], siblings: list[Sequence], num_waiting: int) -> list[Sequence]:
        """Take rows and blocks from the newest low requests for an urgent one, if that gets it in.

        Rows that will be free in a few tokens are waited for. A sequence that was displaced before has
        progressed since, and at most half of the rows are taken in this way: low requests never stop.

        Args:
            num_waiting: displaced sequences that wait.

        Returns:
            Those preempted; none if the urgent request needs none, or more than may be taken.
        """
        left = self.rows.num_rows // 2 - num_waiting
        candidates = [s for s in reversed(list(self.sequences)) if _may_be_displaced(s)][: max(0, left)]
        short = len(members) + len(siblings) - self.rows.num_unclaimed
        needed = sum(self._num_blocks_taken(s) for s in members) + self._num_forked(len(siblings))
        within_reach = self.num_admissible_blocks + self._kv.pool.num_deferred
        within_reach += sum(map(self._kv.num_held, candidates))
        if short > len(candidates) or needed > within_reach:
            return []
        preempted: list[Sequence] = []
        for victim in candidates:
            is_short_of_blocks = needed > self.num_admissible_blocks + self._kv.pool.num_deferred
            if len(preempted) >= short and not is_short_of_blocks:
                break
            victim.displaced_at = victim.num_known_tokens
            self._preempt([victim], preempted)
        self.num_displaced += len(preempted)
        return preempted

    def begin_drafts(self) -> None:
        """Begin a step in which rows may draft."""
        if self.drafter is not None:
            self.drafter.begin_step(len(self.sequences))

    def settle_drafts(self, sequence: Sequence, num_accepted: int) -> None:
        """Keep a running sequence's first drafts, which it sampled too, and forget the others."""
        assert self.drafter is not None
        self.drafter.num_accepted += num_accepted
        self._kv.roll_back(sequence, sequence.num_known_tokens + num_accepted)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's row and blocks; its tokens stay."""
        self._leave(sequence)
        self._kv.free(sequence)
        self.rows.cancel_claims(sequence.request)

    def branch(self, request: Request, continuations: SequenceType[Continuation]) -> None:
        """Continue a search with these continuations, at most as many as it has beams.

        A beam's first continuation stays in its row; the others fork off into the rows of beams that end
        here.
        """
        children: dict[Sequence, list[Continuation]] = {}
        for continuation in continuations:
            children.setdefault(continuation.beam, []).append(continuation)
        for beam in request.sequences:
            if beam.row is not None and beam not in children:
                self._leave(beam)
                self._kv.free(beam)
                self.rows.claim(request, [beam])
        for parent, (first, *others) in children.items():
            for continuation in others:
                child = self.rows.use_claim(request)
                self._kv.fork(parent, child)
                self.rows.take(child)
                child.is_row_new = True
                child.status = SequenceStatus.RUNNING
                self.sequences.add(child)
                continuation.apply(child)
            if not parent.is_row_new:  # the sampled token may differ from the chosen one
                parent.forced_token_ids.append((parent.num_known_tokens, first.token_id))
            first.apply(parent)

    def check_integrity(self) -> None:
        self.rows.check_integrity(sequence.row for sequence in self.sequences)
        for sequence in self.sequences:
            request = sequence.request
            if self.rows.claimed(request) and request.beam_search is None:
                assert sequence.num_computed_tokens < sequence.num_tokens, "a leader that has not forked"
        for sequence in self.preemption.swapped:
            assert sequence.swapped_blocks
            assert sequence.status is SequenceStatus.WAITING

    def _schedule_newest(self, step: StepBuilder, sequence: Sequence) -> bool:
        """A fast path for nearly every row of nearly every step: a plain sequence computes its newest token
        in a block that it has. False, with nothing changed: use `_schedule_sequence`.

        Its gain (five interleaved runs of `benchmarks.scheduler`, fastest step): 0.14 ms instead of 0.20 to
        plan 64 rows, 2.9 instead of 3.7 to plan 1,000.
        """
        request = sequence.request
        if not request.is_plain:
            return False
        known = len(request.prompt_token_ids) + len(sequence.output_token_ids)
        pending = sequence.num_pending_tokens
        is_one_behind = known + pending - sequence.num_computed_tokens == 1
        if not is_one_behind or (pending and known + pending >= request.max_num_tokens):
            return False
        if self.drafter is not None and not pending and self._add_drafts(step, sequence, self.drafter):
            return True
        if not self._kv.append_slot(sequence):
            return False
        step.add_newest(sequence)
        self._kv.register_full_blocks(sequence)
        return True

    def _add_drafts(self, step: StepBuilder, sequence: Sequence, drafter: Drafter) -> bool:
        """Compute a plain sequence's newest token and drafts of those to come; no other row goes short for them."""
        rows = self._config.max_num_seqs - len(self.sequences)
        room = min(
            sequence.request.max_num_tokens - sequence.num_known_tokens - 1,
            step.budget // 2 - len(self.sequences),  # prompts, and requests that wait, need some too
            max(rows, self._config.num_speculative_tokens) - step.num_drafts,
        )
        drafts = drafter.draft(sequence, room) if room > 0 and not step.is_short and step.may_draft else []
        if not drafts:
            return False
        needed = self._kv.num_blocks_needed(sequence, len(drafts) + 1)
        if needed and needed + len(self.sequences) > self.num_admissible_blocks:
            return False
        slots = self._kv.allocate_slots(sequence, len(drafts) + 1, step.step_id)
        assert slots is not None, "the blocks were counted wrongly"
        step.add_drafts(sequence, drafts, slots)
        drafter.num_drafted += len(drafts)
        self._kv.register_full_blocks(sequence)
        return True

    def _schedule_sequence(self, step: StepBuilder, sequence: Sequence, preempted: list[Sequence]) -> None:
        num_tokens = self._num_plannable(sequence, step.budget)
        if num_tokens == 1 and self._kv.append_slot(sequence):
            self._plan(step, sequence, 1, NO_NEW_SLOTS)
            return
        if not num_tokens or (step.is_short and self._kv.num_blocks_needed(sequence, num_tokens)):
            return
        slots = self._kv.allocate_slots(sequence, num_tokens, step.step_id)
        if slots is None and self._make_room(step, [(sequence, num_tokens)], preempted):
            slots = self._kv.allocate_slots(sequence, num_tokens, step.step_id)
        if slots is not None:
            self._plan(step, sequence, num_tokens, slots)

    def _schedule_beams(self, step: StepBuilder, request: Request, preempted: list[Sequence]) -> None:
        beams = [beam for beam in request.sequences if beam.row is not None]
        work = [(beam, self._num_plannable(beam, step.budget)) for beam in beams]
        if not all(num for _, num in work) or sum(num for _, num in work) > step.budget:
            return
        needed = self._kv.num_blocks_needed_together(work)
        if step.is_short and needed:
            return
        if needed <= self._kv.pool.num_available or self._make_room(step, work, preempted):
            self._plan_all(step, work)

    def _num_plannable(self, sequence: Sequence, budget: int) -> int:
        """Return the number of tokens that a running sequence can compute next."""
        request = sequence.request
        known = len(request.prompt_token_ids) + len(sequence.output_token_ids)
        pending = sequence.num_pending_tokens
        if pending and (
            sequence.grammar is not None
            or request.beam_search is not None
            or known + pending >= request.max_num_tokens
        ):
            # These need the token itself; at the limit no token may follow.
            return 0
        return self._chunk(known + pending - sequence.num_computed_tokens, budget)

    def _chunk(self, num_tokens: int, budget: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        return min(num_tokens, budget, threshold) if threshold else min(num_tokens, budget)

    def _make_room(self, step: StepBuilder, work: Work, preempted: list[Sequence]) -> bool:
        """Preempt from the end of the order until `work` fits. False: it was itself preempted, or must wait
        for blocks that steps in flight still name.
        """
        pool = self._kv.pool
        step.is_short = True
        while (short := self._kv.num_blocks_needed_together(work) - pool.num_available) > 0:
            if short <= pool.num_deferred:
                return False
            victims = self._together(self.sequences.last)
            if work[0][0] not in victims:
                self._preempt(victims, preempted)
            elif not self.preemption.drop_last_holder():
                self._preempt(victims, preempted)
                return False
        return True

    def _together(self, sequence: Sequence) -> list[Sequence]:
        if sequence.request.beam_search is None:
            return [sequence]
        return [beam for beam in sequence.request.sequences if beam.row is not None]

    def _preempt(self, victims: list[Sequence], preempted: list[Sequence]) -> None:
        for victim in victims:
            self._leave(victim)
        self.preemption.take_blocks(victims)
        self.rows.cancel_claims(victims[0].request)
        preempted += victims

    def _admit_fresh(self, step: StepBuilder, sequence: Sequence, num_siblings: int) -> Work:
        """Give a new sequence its prefix hits; returns its first chunk, none if it does not fit."""
        parent = _parent(sequence, step)
        if parent is None or not self._kv.can_fork_at(parent, sequence.fork_at):
            parent = None
            hits = self._kv.match_prefix(sequence)
            num_hit_tokens = self._kv.num_hit_tokens(hits)
        else:
            hits, num_hit_tokens = self._kv.shared_blocks(parent, sequence.fork_at), sequence.fork_at
            num_siblings += num_hit_tokens % self._config.block_size > 0  # a copy of the last column
        num_tokens = self._chunk(sequence.num_known_tokens - num_hit_tokens, step.budget)
        if self.sequences:
            needed = self._kv.num_blocks_taken(hits, sequence.num_known_tokens) + self._num_forked(
                num_siblings
            )
            fits = needed <= self._num_offered(step)
        else:
            fits = self._fits_alone(lambda: self._kv.num_blocks_taken(hits, num_hit_tokens + num_tokens))
        if not fits:
            self.waiting_for = "kv"
            return []
        if parent is None:
            self._kv.admit(sequence, hits)
        else:
            self._kv.fork_at(parent, sequence, num_hit_tokens)
        self.preemption.note_admission(sequence, num_hit_tokens)
        request = sequence.request
        if not request.was_admitted:
            request.was_admitted = True
            request.admitted_at = time.monotonic()
            request.num_cached_tokens = min(num_hit_tokens, sequence.num_prompt_tokens)
        return [(sequence, num_tokens)]

    def _admit_swapped(self, step: StepBuilder, members: list[Sequence], num_siblings: int) -> Work:
        """Restore swapped sequences; returns their next work, none if they do not fit."""
        kv, space = self._kv, self._kv.swap_space
        left = [(s, max(1, s.num_known_tokens - s.num_computed_tokens)) for s in members]
        work = [(sequence, self._chunk(num_tokens, step.budget)) for sequence, num_tokens in left]
        if sum(num_tokens for _, num_tokens in work) > step.budget:
            self.waiting_for = "budget"
            return []
        if self.sequences:
            needed = space.num_blocks_taken(members) + kv.num_blocks_needed_together(left)
            needed += self._num_forked(num_siblings)
            fits = needed <= self._num_offered(step)
        else:
            fits = self._fits_alone(
                lambda: space.num_blocks_taken(members) + kv.num_blocks_needed_together(work), spare=members
            )
        if not fits:
            self.waiting_for = "kv"
            return []
        self.preemption.restore(members)
        return work

    def _num_blocks_taken(self, sequence: Sequence) -> int:
        """Return the blocks that a waiting sequence would take with all of its known tokens."""
        hits = [] if sequence.swapped_blocks else self._kv.match_prefix(sequence)
        return self._kv.num_blocks_taken(hits, sequence.num_known_tokens)

    def _num_forked(self, num_siblings: int) -> int:
        """Return the blocks that these sequences take of their own when they fork off: a column each."""
        return num_siblings * self._kv.groups.num_groups

    def _num_offered(self, step: StepBuilder) -> int:
        """Return the number of blocks that a newcomer may take while others run."""
        return self._kv.pool.num_available - step.promised_blocks - self._watermark_blocks

    def _fits_alone(self, count_needed: Callable[[], int], spare: SequenceType[Sequence] = ()) -> bool:
        """Check for enough blocks; swapped sequences make room for those that will run, `spare`."""
        pool = self._kv.pool
        while (needed := count_needed()) > pool.num_available + pool.num_deferred:
            if not self.preemption.drop_last_holder(spare):
                return False
        return needed <= pool.num_available

    def _plan_all(self, step: StepBuilder, work: Work) -> None:
        """Add work whose blocks can be allocated."""
        for sequence, num_tokens in work:
            if sequence.is_row_new:
                self._enter(step, sequence)
            slots = self._kv.allocate_slots(sequence, num_tokens, step.step_id)
            assert slots is not None, "the blocks were counted wrongly"
            self._plan(step, sequence, num_tokens, slots)

    def _plan(self, step: StepBuilder, sequence: Sequence, num_tokens: int, slots: AllocatedSlots) -> None:
        """Add work whose blocks are allocated; fork the siblings if it reaches the prompt's last token."""
        is_caught_up = step.add_work(sequence, num_tokens, slots)
        self._kv.register_full_blocks(sequence)
        if not is_caught_up:
            step.promised_blocks += self._kv.num_blocks_left(sequence)
            return
        request = sequence.request
        # A search's first candidates determine which of its beams fork.
        if len(request.sequences) > 1 and request.beam_search is None:
            siblings = self.rows.cancel_claims(request)
            for sibling in siblings:
                self._kv.fork(sequence, sibling)
                self.rows.take(sibling)
                self._enter(step, sibling)
            assert sequence.row is not None
            if siblings:
                step.add_siblings(sequence.row, siblings)

    def _enter(self, step: StepBuilder, sequence: Sequence) -> None:
        """Tell execution a sequence's row and its contents from this step on."""
        if sequence.status is not SequenceStatus.RUNNING:
            sequence.status = SequenceStatus.RUNNING
            self.sequences.add(sequence)
        sequence.is_row_new = False
        step.add_row(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Release a sequence's row; it keeps its blocks."""
        request = sequence.request
        request.peak_blocks = max(request.peak_blocks, sum(map(self._kv.num_held, request.sequences)))
        self.sequences.discard(sequence)
        self.rows.give_back(sequence)
        sequence.is_row_new = False
        sequence.forced_token_ids = []
        sequence.status = SequenceStatus.WAITING


def _parent(sequence: Sequence, step: StepBuilder) -> Sequence | None:
    """Return the chain that a sequence can fork off: blocks are copied before a step writes into any."""
    parent = sequence.fork_of
    is_there = parent is not None and parent.status is SequenceStatus.RUNNING and sequence.can_enter
    return parent if is_there and parent is not None and parent.last_step_id < step.step_id else None
