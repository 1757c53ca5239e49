"""Plans the tokens computed in the next step, and applies the results when it retires.

There is no prefill phase and no decode phase: each sequence has `num_computed_tokens` chasing `num_tokens`,
and every step hands out one token budget, to running sequences first, then to waiting ones, oldest first. A
decode is a sequence one token behind; a chunked prefill is one further behind than the budget reaches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import count

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import Capacity, FinishReason, SchedulerStats
from pagemill.engine.plan import RowWork, StepPlan, StepResult, TokenLogprobs
from pagemill.engine.scheduling.admissibility import check_fits, check_labels_fit
from pagemill.engine.scheduling.beam_search import BeamSearch, restart_beams
from pagemill.engine.scheduling.drafter import accepted
from pagemill.engine.scheduling.kv.manager import KVCacheManager
from pagemill.engine.scheduling.labelling import Labelling, drop_chains, is_complete, take_reads
from pagemill.engine.scheduling.request import Candidates, Request, Sequence, SequenceStatus, SequenceUpdate
from pagemill.engine.scheduling.running_batch import RunningBatch, is_urgent
from pagemill.engine.scheduling.step_builder import InFlightStep, StepBuilder
from pagemill.engine.scheduling.stopping import append_sampled, take_scores
from pagemill.engine.scheduling.suspects import Suspects
from pagemill.engine.scheduling.waiting_queue import WaitingQueue, will_fork


class Scheduler:
    """Plans steps and retires them. Owned by one thread.

    Every plan that `schedule` returns must be settled once, in order, by `update` or by `recover`; only the
    plan of a step that failed to launch may be recovered while an older one is in flight.

    The oldest running sequence can always be scheduled, if need be by preempting others, so every request
    that `add_request` accepted ends. Victims keep their arrival and all their tokens; their KV is recomputed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self.kv_cache = KVCacheManager.of(config)
        self._batch = RunningBatch(config, self.kv_cache)
        self.preemption = self._batch.preemption
        self._waiting = WaitingQueue(self._batch.rows)
        self._labelling = Labelling(self._waiting)
        self._requests: dict[str, Request] = {}
        self._suspects = Suspects()
        self._in_flight: deque[InFlightStep] = deque()
        self._unread: dict[Sequence, tuple[list[int], list[TokenLogprobs] | None]] = {}
        """Sampled tokens of sequences whose grammar is still computing the state after them: the scheduler
        treats these as if their step had not retired."""
        self._insertions = count()
        self._next_step_id = 0
        self._steps_failed = 0
        self._num_invalid_logits = 0
        self._discarded_tokens = 0

    def add_request(self, request: Request) -> None:
        """Queue a request with at least one unfinished sequence.

        Raises NeverFits if the pool or the rows can't hold it even alone, InvalidRequest if its id is in use
        or there is nothing left to generate.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id!r} is already running")
        request.max_num_tokens = min(
            len(request.prompt_token_ids) + request.max_tokens, self._config.max_model_len
        )
        live = request.live_sequences
        if request.labels is not None:
            check_labels_fit(request, self._config)
        if not live or any(sequence.num_known_tokens >= request.max_num_tokens for sequence in live):
            raise InvalidRequest(f"request {request.request_id!r} has nothing left to generate")
        check_fits(request, self._config)
        if request.params.beam_width is not None:
            request.beam_search = BeamSearch.of(request, self._eos_token_ids)
        request.classify()
        request.insertion = next(self._insertions)
        self._requests[request.request_id] = request
        self._waiting.enqueue(request)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """End a request now; its blocks are released once no step in flight names them. Unknown id: []."""
        return self._end_request(request_id, "abort", None, None)

    def fail(self, request_id: str, message: str, code: str) -> list[SequenceUpdate]:
        """End a request with an error. Unknown id: []."""
        return self._end_request(request_id, "error", message, code)

    def finish_sequence(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence for an external reason, such as a stop string. No-op if it has already ended."""
        if not sequence.is_finished:
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None: nothing can run before a step in flight retires or a request arrives."""
        unsettled = sum(not step.is_settled for step in self._in_flight)
        assert unsettled <= self._config.depth, f"{unsettled} steps in flight"
        step = StepBuilder(self._next_step_id, self._config.max_num_batched_tokens)
        self._labelling.enqueue()
        if self._suspects:
            step.may_draft = False  # what raises alone must be the request's own doing
            self._schedule_suspects(step)
        else:
            self._batch.begin_drafts()
            self._schedule_running(step, self._admit_urgent(step))
            while (first := self._next_waiting()) is not None and self._admit(step, first):
                pass
        is_short_of_budget = not self._suspects and self._batch.waiting_for == "budget"
        idle = self._labelling.idle(keeps_parents=is_short_of_budget)
        for sequence in idle:
            self._end(sequence)
        if idle:
            self._labelling.enqueue()
        if step.is_empty:
            return self.schedule() if idle else None  # their rows are free now
        self._next_step_id += 1
        swap_space = self.kv_cache.swap_space
        planned = step.build(self._batch.rows.take_freed(), *swap_space.take_copies(step.step_id))
        self._in_flight.append(planned)
        if swap_space.capacity:
            self.preemption.cost.step_planned(planned.plan)
        return planned.plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Retire the oldest step in flight: append the sampled tokens, end the sequences that are complete.

        A row that computed a chunk of its prompt gets an update without tokens. Tokens sampled for a sequence
        that has since ended are discarded; those of one that was since preempted count.
        """
        step = self._in_flight[0]
        assert step.plan.step_id == plan.step_id == result.step_id, (
            "steps retire in the order they were planned"
        )
        step.is_settled = True
        self._retire_settled()
        if step.has_failed:
            return []
        if self._batch.drafter is not None:
            self._batch.drafter.retire(plan, result)
        updates: list[SequenceUpdate] = []
        for number, entries in result.prompt_logprobs.items():
            updates += self._take_scores(step.computed[number], plan.work[number].first_scored, entries)
        for number, values in result.reads.items():
            updates += self._take_reads(step.computed[number], plan.work[number], values)
        updates += step.progress()
        beams: dict[Request, list[tuple[Sequence, Candidates]]] = {}
        for number, sequence, drafts in step.outcomes():
            if sequence.status is SequenceStatus.FINISHED:
                self._discarded_tokens += len(result.token_ids[number])
                continue
            sampled = result.token_ids[number], result.logprobs.get(number)
            if drafts:
                sampled = accepted(result, number, drafts)
            is_sound = number not in result.invalid and number not in result.without_choice
            if sequence.grammar is not None and is_sound:
                sequence.grammar.prepare(sampled[0][0])
                if not sequence.grammar.is_ready:
                    self._unread[sequence] = sampled
                    continue
            sequence.num_pending_tokens -= 1 + len(drafts)
            if drafts:
                self._batch.settle_drafts(sequence, len(sampled[0]) - 1)
            if number in result.invalid:
                updates += self._fail_invalid(sequence.request)
            elif sequence.request.beam_search is not None:
                beams.setdefault(sequence.request, []).append((sequence, result.candidates[number]))
            elif number in result.without_choice:
                updates += self._fail_without_choice(sequence.request)
            else:
                self._append(sequence, *sampled, updates)
        for request, candidates in beams.items():
            updates += self._advance_beams(request, candidates)
        self._suspects.clear(step)
        return updates

    def read_on(self) -> list[SequenceUpdate]:
        """Append the sampled tokens of sequences whose grammars have become ready, unless they have ended."""
        updates: list[SequenceUpdate] = []
        for sequence, sampled in list(self._unread.items()):
            if sequence.is_finished:
                del self._unread[sequence]
                self._discarded_tokens += len(sampled[0])
            elif sequence.grammar is None or sequence.grammar.is_ready:
                del self._unread[sequence]
                sequence.num_pending_tokens -= 1
                self._append(sequence, *sampled, updates)
        return updates

    @property
    def has_unread(self) -> bool:
        """True if any sequence waits for its grammar."""
        return bool(self._unread)

    def is_unread(self, sequence: Sequence) -> bool:
        """Return True if this sequence waits for its grammar, and so is left out of steps."""
        return sequence in self._unread

    def recover(self, plan: StepPlan) -> None:
        """Undo the step of this plan, which raised. Its requests wait again, as suspects.

        Steps planned after it read what it was to write, so they are void as well; settle them as usual:
        their results are ignored and their requests are not blamed. A suspect gets steps of its own until it
        has got past its earlier position; the caller fails one that raises alone.
        """
        void = [step for step in self._in_flight if step.plan.step_id >= plan.step_id]
        assert void, "only a step in flight can fail"
        assert void[0].plan is plan, "only a step in flight can fail"
        failed = void[0]
        failed.is_settled = True
        if failed.has_failed:
            self._retire_settled()
            return
        self._steps_failed += 1
        self._suspects.add(failed.requests())
        self.kv_cache.drop_unproven(plan.step_id)
        for sequence in list(self.preemption.swapped):
            if sequence.swapped_blocks and sequence.last_step_id >= plan.step_id:
                self.preemption.drop(sequence)  # its host copy is suspect, or was never made
                self._waiting.enqueue(sequence.request)
        self._retire_settled()
        for step in void:
            if not step.has_failed:
                self._undo(step)

    def request_ids(self, plan: StepPlan) -> list[str]:
        """Return the requests to blame if this step raises: none if it is void. Call before `recover`."""
        for step in self._in_flight:
            if step.plan is plan and not step.has_failed:
                return [request.request_id for request in step.requests()]
        return []

    def num_step_failures(self, request_id: str) -> int:
        """Return the number of steps that raised with this request in them; 0 for one that has ended."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_step_failures

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """The number of sequences that hold a row."""
        return len(self._batch.sequences)

    @property
    def num_waiting(self) -> int:
        """The number of requests with a sequence that waits for blocks, a row or budget."""
        return self._waiting.num_requests

    def stats(self) -> SchedulerStats:
        preemption, drafter = self.preemption, self._batch.drafter
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_for=self._batch.waiting_for,
            swapped=len(preemption.swapped),
            displaced=self._batch.num_displaced,
            preemptions=preemption.num_recomputing,
            swap_preemptions=preemption.num_swapping,
            preempted_tokens=preemption.preempted_tokens,
            recomputed_tokens=preemption.recomputed_tokens,
            steps_failed=self._steps_failed,
            invalid_logits=self._num_invalid_logits,
            discarded_tokens=self._discarded_tokens,
            drafted_tokens=drafter.num_drafted if drafter is not None else 0,
            accepted_tokens=drafter.num_accepted if drafter is not None else 0,
        )

    def capacity(self) -> Capacity:
        return Capacity(
            free_rows=self._batch.rows.num_unclaimed,
            available_blocks=self._batch.num_admissible_blocks,
            block_size=self._config.block_size,
            waiting=self.num_waiting,
            block_limits=self.kv_cache.groups.limits,
        )

    def check_integrity(self) -> None:
        """Recompute every invariant from the requests. Raises AssertionError. Slow: for tests."""
        sequences = [sequence for request in self._requests.values() for sequence in request.sequences]
        self.kv_cache.check_integrity(sequences)
        self._batch.check_integrity()
        for sequence in sequences:
            assert (sequence in self._batch.sequences) == (sequence.status is SequenceStatus.RUNNING)
            assert (sequence in self.preemption.swapped) == bool(sequence.swapped_blocks)
            if sequence.status is not SequenceStatus.RUNNING:
                assert sequence.row is None
                assert not sequence.block_ids
                assert sequence.num_computed_tokens == 0 or sequence.swapped_blocks
        for request in self._requests.values():
            assert any(s in self._waiting or s in self._batch.sequences for s in request.live_sequences)
            waiting = [s for s in request.live_sequences if s.status is SequenceStatus.WAITING]
            claimed = self._batch.rows.claimed(request)
            together = will_fork(request) or request.beam_search is not None or request.labels is not None
            for sequence in waiting if not together else ():
                assert (sequence in self._waiting) != (sequence in claimed)
        assert all(request.request_id in self._requests for request in self._suspects)

    def _schedule_running(self, step: StepBuilder, candidates: Iterable[Sequence]) -> None:
        for victim in self._batch.schedule(step, candidates):
            self._waiting.enqueue(victim.request)

    def _admit_urgent(self, step: StepBuilder) -> Iterable[Sequence]:
        """Admit urgent requests ahead of all others' tokens; returns the running sequences still to schedule."""
        first = self._next_waiting()
        if first is None or not is_urgent(first):
            return self._batch.sequences
        self._schedule_running(step, [s for s in self._batch.sequences if is_urgent(s)])
        num_displaced = sum(s.displaced_at is not None for s in self._waiting)
        while first is not None and is_urgent(first):
            victims = self._batch.displace(*self._waiting.group(first), num_displaced)
            for victim in victims:
                self._waiting.enqueue(victim.request)
            num_displaced += len(victims)
            first = self._next_waiting() if self._admit(step, first) else None
        return [sequence for sequence in self._batch.sequences if not is_urgent(sequence)]

    def _next_waiting(self) -> Sequence | None:
        """Return the first waiting sequence, except preempted ones that also wait for their grammars."""
        return next((sequence for sequence in self._waiting if not self.is_unread(sequence)), None)

    def _admit(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Move a waiting sequence into the batch. False: not now."""
        if not step.budget or step.is_short:
            self._batch.waiting_for = "kv" if step.is_short else "budget"
            return False
        if not self._batch.admit(step, *self._waiting.group(sequence)):
            return False
        self._waiting.discard(sequence)
        self._labelling.entered(sequence)
        return True

    def _schedule_suspects(self, step: StepBuilder) -> None:
        """Give the first suspect that can run a step of its own; if none can, run the others, admit none."""
        for request in self._suspects:
            self._schedule_running(step, [s for s in self._batch.sequences if s.request is request])
            for sequence in [s for s in request.sequences if s in self._waiting]:
                if not self._admit(step, sequence):
                    break
            if not step.is_empty:
                return
            step.is_short = False
        self._schedule_running(step, [s for s in self._batch.sequences if s.request not in self._suspects])

    def _take_scores(
        self, sequence: Sequence, position: int, entries: list[TokenLogprobs]
    ) -> list[SequenceUpdate]:
        """Record the log-probabilities of given tokens from a position on: the prompt's, or a continuation's."""
        if any(entry.logprob is not None and math.isnan(entry.logprob) for entry in entries):
            return self._fail_invalid(sequence.request)
        if not sequence.continuation:
            sequence.request.record_prompt_logprobs(position, entries)
            return []
        end = None if sequence.is_finished else take_scores(sequence, position, entries)
        if end is None:
            return []
        self._end(sequence)
        return [end]

    def _take_reads(
        self, sequence: Sequence, work: RowWork, values: list[list[float]]
    ) -> list[SequenceUpdate]:
        """Record the log-probabilities of labels' tokens; the last ones end the request."""
        if sequence.is_finished:
            return []
        if any(math.isnan(value) for each in values for value in each):
            return self._fail_invalid(sequence.request)
        end = take_reads(sequence, zip((work.start + index for index, _ in work.reads), values, strict=True))
        if end is None:
            if sequence.status is SequenceStatus.WAITING and is_complete(sequence):
                self._end(sequence)  # preempted while its last step was in flight
                self._waiting.enqueue(sequence.request)
            return []
        for chain in sequence.request.live_sequences:
            self._end(chain)
        return [end]

    def _append(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        updates: list[SequenceUpdate],
    ) -> None:
        update = append_sampled(sequence, token_ids, logprobs, self._eos_token_ids)
        self.kv_cache.register_full_blocks(sequence)
        failure = None if sequence.grammar is None else sequence.grammar.failure
        if sequence.finish_reason is not None:
            self._end(sequence)
        elif failure is not None:
            updates += self._end_request(sequence.request.request_id, "error", str(failure), failure.code)
            return
        updates.append(update)

    def _advance_beams(
        self, request: Request, beams: list[tuple[Sequence, Candidates]]
    ) -> list[SequenceUpdate]:
        """Choose a search's continuations, or end it."""
        search = request.beam_search
        assert search is not None
        if any(beam.row is None for beam, _ in beams):  # preempted since; scheduled or restarted later
            self._discarded_tokens += len(beams)
            return []
        continuations = search.advance(beams)
        if continuations:
            self._batch.branch(request, continuations)
            return [SequenceUpdate(request.sequences[0])]
        updates = search.results(request)
        if not updates:
            return self._fail_without_choice(request)
        for sequence in request.sequences:
            self._end(sequence)
        return updates

    def _fail_invalid(self, request: Request) -> list[SequenceUpdate]:
        """Fail a request with non-finite logits, and make the blocks it may have corrupted unfindable."""
        live = request.live_sequences
        self._num_invalid_logits += len(live)
        for sequence in live:
            self.kv_cache.forget(sequence)
        return self.fail(request.request_id, "the model's logits were not finite", "output_invalid")

    def _fail_without_choice(self, request: Request) -> list[SequenceUpdate]:
        message = "the request's bias, bars and structure together left no token to choose"
        return self.fail(request.request_id, message, "output_invalid")

    def _end_request(
        self, request_id: str, reason: FinishReason, error: str | None, error_code: str | None
    ) -> list[SequenceUpdate]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        live = request.live_sequences
        for sequence in live:
            sequence.finish_reason = reason
            self._end(sequence)
        if request.beam_search is not None:
            restart_beams(request)  # its candidates were never output
            live = live[: request.params.n]
        if request.labels is not None:
            request.num_open_chains = 0
            live = [drop_chains(request)]
            live[0].finish_reason = reason
        return [SequenceUpdate(sequence, error=error, error_code=error_code) for sequence in live]

    def _end(self, sequence: Sequence) -> None:
        """Release all that an ended sequence holds."""
        request = sequence.request
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.remove(sequence)
        else:
            self._waiting.discard(sequence)
            self.preemption.forget(sequence)
            self._batch.rows.cancel_claim(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.num_pending_tokens = 0
        if request.is_finished:
            del self._requests[request.request_id]
            self._suspects.discard(request)
            self._labelling.forget(request)
        elif len(request.sequences) > 1 and request.labels is None:
            self._waiting.enqueue(request)

    def _retire_settled(self) -> None:
        while self._in_flight and self._in_flight[0].is_settled:
            step = self._in_flight.popleft()
            self.kv_cache.retire(step.plan.step_id)
            if self.kv_cache.swap_space.capacity:
                self.preemption.cost.step_ended(step.plan, is_valid=not step.has_failed)

    def _undo(self, step: InFlightStep) -> None:
        """Return a void step's sequences to waiting, without the tokens it was to sample."""
        step.has_failed = True
        self._batch.rows.mark_freed(step.plan.freed_rows, self._batch.sequences)
        for sequence in step.sampled:
            if not sequence.is_finished:
                sequence.num_pending_tokens -= 1
        for sequence in dict.fromkeys(step.computed + step.sampled):
            if sequence.status is SequenceStatus.RUNNING:
                self._batch.remove(sequence)
        for request in step.requests():
            restart_beams(request)
            self._waiting.enqueue(request)
