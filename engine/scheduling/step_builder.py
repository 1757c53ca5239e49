"""A step under construction, and its record while it is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.scheduling.kv.manager import NO_NEW_SLOTS, AllocatedSlots
from pagemill.engine.scheduling.request import Grammar, Request, Sequence, SequenceStatus, SequenceUpdate

_NO_DRAFTS: list[int] = []


def constrain(sample: Sample, grammar: Grammar) -> None:
    """Allow only the tokens that a grammar allows."""
    sample.allowed_token_ids = grammar.allowed_token_ids()
    sample.token_mask = grammar.token_mask()


@dataclass(slots=True)
class InFlightStep:
    """A planned step until its result arrives: maps its rows to their sequences."""

    plan: StepPlan
    computed: list[Sequence] = field(default_factory=list)
    """Parallel to `plan.work`."""
    sampled: list[Sequence] = field(default_factory=list)
    """Parallel to `plan.samples`."""
    prefilling: list[Sequence] = field(default_factory=list)
    """The sequences of `computed` whose prompt is still incomplete."""
    late: list[int] = field(default_factory=list)
    """Numbers of the samples whose grammar lacks the token of the step before."""
    void: set[int] = field(default_factory=set)
    """Numbers of samples that are ignored."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Index in `sampled` of a row's first sample -> its drafts. One more sample of the row follows per draft."""
    has_failed: bool = False
    """True if this or an earlier step raised: its result is ignored."""
    is_settled: bool = False
    """The caller has reported its failure and will not settle it again."""

    def requests(self) -> list[Request]:
        return list(dict.fromkeys(sequence.request for sequence in self.computed))

    def outcomes(self) -> Iterator[tuple[int, Sequence, list[int]]]:
        """Yield a sample number, its sequence, and its drafts, whose samples follow."""
        num_drafts = 0
        for number, sequence in enumerate(self.sampled):
            if num_drafts:
                num_drafts -= 1
                continue
            drafts = self.drafts.get(number, _NO_DRAFTS)
            num_drafts = len(drafts)
            yield number, sequence, drafts

    def progress(self) -> list[SequenceUpdate]:
        """Return updates without tokens for the sequences whose prompt is still incomplete."""
        return [
            SequenceUpdate(sequence)
            for sequence in self.prefilling
            if sequence.status is SequenceStatus.RUNNING and sequence.fork_of is None
        ]


@dataclass(slots=True)
class StepBuilder:
    """Collects one step's work under its token budget."""

    step_id: int
    budget: int
    """Tokens that can still be added."""
    is_short: bool = False
    """True if a sequence did not get the blocks it needed: sequences after it must not allocate any."""
    promised_blocks: int = 0
    """Blocks that rows whose prefill the budget cuts short will need before they can sample."""
    may_draft: bool = True
    num_drafts: int = 0
    """Tokens drafted for all rows."""
    _new_rows: list[NewRow] = field(default_factory=list)
    _block_copies: list[tuple[int, int]] = field(default_factory=list)
    _decodes: list[tuple[RowWork, Sequence, bool]] = field(default_factory=list)
    """Work, its sequence, and whether it reaches the last token that is known or in flight."""
    _prefills: list[tuple[RowWork, Sequence, bool]] = field(default_factory=list)
    _drafts: dict[int, list[int]] = field(default_factory=dict)
    """Row -> the tokens drafted for it."""
    _siblings: dict[int, list[Sequence]] = field(default_factory=dict)
    """Row -> the sequences that fork off it in this step, and also sample from its last token."""

    @property
    def is_empty(self) -> bool:
        return not self._decodes and not self._prefills

    def add_row(self, sequence: Sequence) -> None:
        """Place a sequence in its row, with its current blocks."""
        request, row = sequence.request, sequence.row
        assert row is not None
        num_scored = 0 if sequence.scoring is None else sequence.scoring.num_scored
        self._new_rows.append(
            NewRow(
                row=row,
                request_id=request.request_id,
                sample_index=sequence.index,
                token_ids=sequence.token_ids(),
                num_prompt_tokens=sequence.num_prompt_tokens + num_scored,
                block_ids=list(sequence.block_ids),
                params=request.params,
                seed=request.seed,
                bad_word_ids=request.bad_word_ids,
                adapter_slot=request.adapter_slot,
                media=request.media,
            )
        )

    def add_newest(self, sequence: Sequence) -> None:
        """Compute the one token that a plain sequence lacks: `add_work` without the cases it never has."""
        row, start = sequence.row, sequence.num_computed_tokens
        assert row is not None
        self.budget -= 1
        sequence.num_computed_tokens = start + 1
        sequence.last_step_id = self.step_id
        self._decodes.append((RowWork(row, start, 1), sequence, True))

    def add_drafts(self, sequence: Sequence, drafts: list[int], slots: AllocatedSlots) -> None:
        """Compute the one token that a plain sequence lacks, and drafts of the next, as a row each."""
        row, start = sequence.row, sequence.num_computed_tokens
        assert row is not None
        newest = RowWork(row, start, 1, slots.new_block_ids, slots.replaced_blocks)
        newest.forced_token_ids = list(enumerate(drafts, start + 1))
        self._block_copies += slots.block_copies
        works = [newest, *(RowWork(row, start + ahead, 1) for ahead in range(1, len(drafts) + 1))]
        self._decodes += [(work, sequence, True) for work in works]
        self._drafts[row] = drafts
        self.num_drafts += len(drafts)
        self.budget -= len(works)
        sequence.num_computed_tokens = start + len(works)
        sequence.last_step_id = self.step_id

    def add_work(self, sequence: Sequence, num_tokens: int, slots: AllocatedSlots) -> bool:
        """Compute a sequence's next tokens. Advances the sequence; True if that brings it up to date."""
        assert sequence.row is not None
        assert 0 < num_tokens <= self.budget
        work = RowWork(sequence.row, sequence.num_computed_tokens, num_tokens)
        if slots is not NO_NEW_SLOTS:
            work.new_block_ids, work.replaced_blocks = slots.new_block_ids, slots.replaced_blocks
            self._block_copies += slots.block_copies
        request = sequence.request
        if sequence.scoring is not None:
            sequence.scoring.request(work)
        elif request.prompt_logprobs and request.lacks_prompt_logprobs(work.start, work.start + num_tokens):
            work.num_prompt_logprobs = request.params.prompt_logprobs
        if sequence.forced_token_ids:
            work.forced_token_ids, sequence.forced_token_ids = sequence.forced_token_ids, []
        self.budget -= num_tokens
        sequence.num_computed_tokens += num_tokens
        sequence.last_step_id = self.step_id
        is_caught_up = sequence.num_computed_tokens == sequence.num_tokens
        (self._decodes if num_tokens == 1 else self._prefills).append((work, sequence, is_caught_up))
        return is_caught_up

    def add_siblings(self, row: int, siblings: list[Sequence]) -> None:
        """Sample for these sequences too from the last token of `row`, where the step completes the prompt."""
        self._siblings[row] = siblings

    def build(
        self,
        freed_rows: list[int],
        host_stores: list[tuple[int, int]],
        host_loads: list[tuple[int, int]],
    ) -> InFlightStep:
        """Build the step; see `StepPlan` for the arguments."""
        entries = self._decodes + self._prefills
        plan = StepPlan(self.step_id, freed_rows, self._new_rows, host_stores, host_loads, self._block_copies)
        plan.work = [work for work, _, _ in entries]
        plan.num_drafts = self.num_drafts
        plan.has_adapters = any(sequence.request.adapter_slot >= 0 for _, sequence, _ in entries)
        plan.has_media = any(
            (media := sequence.request.media) is not None and work.start < media.end
            for work, sequence, _ in entries
        )
        step = InFlightStep(plan, [sequence for _, sequence, _ in entries])
        token_index = -1
        for work, sequence, is_caught_up in entries:
            token_index += work.num_tokens
            if not is_caught_up:
                step.prefilling.append(sequence)
            elif sequence.scoring is not None:
                continue  # the scoring result ends it
            elif sequence.request.is_plain:  # `_add_sample` without the cases it never has
                if self._drafts and (drafts := self._drafts.pop(work.row, None)) is not None:
                    step.drafts[len(plan.samples)] = drafts
                plan.samples.append(Sample(work.row, token_index, work.start + work.num_tokens))
                step.sampled.append(sequence)
                sequence.num_pending_tokens += 1
            else:
                self._add_sample(step, sequence, token_index)
                for sibling in self._siblings.get(work.row, ()):
                    self._add_sample(step, sibling, token_index)
        plan.samples_later = bool(step.late)
        return step

    @staticmethod
    def _add_sample(step: InFlightStep, sequence: Sequence, token_index: int) -> None:
        assert sequence.row is not None
        sample = Sample(sequence.row, token_index, sequence.num_computed_tokens)
        sample.num_candidates = sequence.request.num_candidates
        if sequence.grammar is not None and sequence.num_pending_tokens:
            step.late.append(len(step.plan.samples))
        elif sequence.grammar is not None:
            constrain(sample, sequence.grammar)
        step.plan.samples.append(sample)
        step.sampled.append(sequence)
        sequence.num_pending_tokens += 1
