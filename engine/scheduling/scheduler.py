"""Plans the tokens that the next step computes, and applies the results when it retires.

There is no prefill phase and no decode phase: each sequence has `num_computed_tokens` chasing `num_tokens`,
and every step distributes one token budget, to running sequences first, then to waiting ones, oldest first. A
decode is a sequence one token behind; a chunked prefill is one that is behind by more than the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import Capacity, FinishReason, SchedulerStats
from pagemill.engine.plan import RowWork, StepPlan, StepResult, TokenLogprobs
from pagemill.engine.scheduling.admissibility import check_fits, check_labels_fit
from pagemill.engine.scheduling.drafter import accepted
from pagemill.engine.scheduling.kv.manager import KVCacheManager
from pagemill.engine.scheduling.labeling import Labelling
from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus, SequenceUpdate
from pagemill.engine.scheduling.running_batch import RunningBatch, is_urgent
from pagemill.engine.scheduling.scoring import drop_chains, has_nan
from pagemill.engine.scheduling.step_builder import InFlightStep, StepBuilder, constrain
from pagemill.engine.scheduling.stopping import append_sampled
from pagemill.engine.scheduling.suspects import Suspects
from pagemill.engine.scheduling.waiting_queue import WaitingQueue, siblings, will_fork

Sampled = tuple[list[int], list[TokenLogprobs] | None]
"""Tokens, and their log-probabilities if requested."""


class Scheduler:
    """Plans steps and retires them. Owned by one thread.

    Every plan that `schedule` returns must be settled once, in order, by `update` or by `recover`; only the
    plan of a step that failed to launch may be recovered while an older one is in flight.

    The oldest running sequence can always be scheduled, if necessary by preempting others, so every request
    that `add_request` accepted finishes. Victims keep their arrival and all their tokens; their KV is recomputed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self.kv_cache = KVCacheManager.from_config(config)
        self._batch = RunningBatch(config, self.kv_cache)
        self._waiting = WaitingQueue(self._batch.rows)
        self._labeling = Labelling(self._waiting)
        self._requests: dict[str, Request] = {}
        self._suspects = Suspects()
        self._in_flight: deque[InFlightStep] = deque()
        self._unread: dict[Sequence, Sampled] = {}
        """Samples of sequences that are held for their grammars."""
        self._insertions = count()
        self._next_step_id = 0
        self._steps_failed = 0
        self._num_invalid_logits = 0
        self._discarded_tokens = 0

    def add_request(self, request: Request) -> None:
        """Queue a request with at least one unfinished sequence.

        Raises as `check` does.
        """
        self.check(request)
        request.classify()
        request.insertion = next(self._insertions)
        self._requests[request.request_id] = request
        request.stay.wait(self._batch.occupancy)
        self._waiting.enqueue(request)

    def check(self, request: Request) -> None:
        """Raise NeverFits if the pool or the rows can't hold a request even alone, InvalidRequest if its id is in use
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

    def has_cached_media(self, request: Request) -> bool:
        """Return True if the KV cache has all of a request's media."""
        assert request.media is not None
        return self.kv_cache.match_prefix(request.sequences[0]).num_tokens >= request.media.end

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

    def extend(self, sequence: Sequence, token_id: int) -> None:
        """Continue a sequence that is held for candidates with this token."""
        sequence.is_held = False
        sequence.num_pending_tokens -= 1
        if sequence.row is not None and not sequence.is_row_new:  # the sampled token may differ
            sequence.forced_token_ids.append((sequence.num_known_tokens, token_id))
        sequence.output_token_ids.append(token_id)

    def fork(self, parent: Sequence, place: Sequence) -> Sequence:
        """Return a copy of a held sequence that replaces a finished sequence of the same request."""
        assert parent.is_held
        assert place.is_finished
        child = Sequence(parent.request, place.index, list(parent.output_token_ids), is_held=True)
        child.num_pending_tokens = 1
        parent.request.sequences[place.index] = child
        self._batch.fork(parent, child)
        self._waiting.enqueue(parent.request)
        return child

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can run before a step in flight retires or a request arrives."""
        unsettled = sum(not step.is_settled for step in self._in_flight)
        assert unsettled <= self._config.depth, f"{unsettled} steps in flight"
        self._batch.occupancy.tick(self.num_running, self._batch.waiting_for if len(self._waiting) else None)
        step = StepBuilder(self._next_step_id, self._config.max_num_batched_tokens)
        self._labeling.enqueue()
        if self._suspects:
            step.may_draft = False  # an error in a separate step must be caused by the request alone
            self._schedule_suspects(step)
        else:
            self._batch.drafter.begin_step(self.num_running)
            self._schedule_running(step, self._admit_urgent(step))
            while (first := self._next_waiting()) is not None and self._admit(step, first):
                pass
        is_short_of_budget = not self._suspects and self._batch.waiting_for == "budget"
        idle = self._labeling.idle(keeps_parents=is_short_of_budget)
        for sequence in idle:
            self._end(sequence)
        if idle:
            self._labeling.enqueue()
        if step.is_empty:
            return self.schedule() if idle or self._preempt_held() else None
        self._next_step_id += 1
        copies = self.kv_cache.host.take_copies(step.step_id)
        planned = step.build(self._batch.rows.take_freed(), *copies)
        planned.plan.state_copies = self.kv_cache.states.take_copies(step.step_id)
        self._in_flight.append(planned)
        return planned.plan

    def constrain(self, plan: StepPlan) -> bool:
        """Add the grammars' tokens to the newest plan, which `samples_later`, after the step before it was settled.

        Samples are void if a token is known already, forced by the grammar, or if the grammar is not ready.

        Returns:
            False if there is nothing to sample, because the step before it raised.
        """
        step = self._in_flight[-1]
        assert step.plan is plan
        if step.has_failed:
            return False
        for number in step.late:
            sequence, sample = step.sampled[number], plan.samples[number]
            if sequence.is_finished:
                continue
            if sequence.num_known_tokens == sample.position:
                assert sequence.grammar is not None
                constrain(sample, sequence.grammar)
                continue
            step.void.add(number)
            sequence.num_pending_tokens -= 1
            if sequence.is_held:
                self._batch.redo_newest(sequence)
        return True

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Retire the oldest step in flight: append the sampled tokens, end the sequences that are complete.

        A row that computed a chunk of its prompt gets an update without tokens. Tokens sampled for a sequence
        that has since ended are discarded; tokens of a sequence preempted in the meantime are appended.
        """
        step = self._in_flight[0]
        assert step.plan.step_id == plan.step_id == result.step_id, (
            "steps retire in the order they were planned"
        )
        step.is_settled = True
        self._retire_settled()
        if step.has_failed:
            return []
        self._batch.drafter.retire(plan, result)
        updates: list[SequenceUpdate] = []
        for number, found in (result.prompt_logprobs | result.reads).items():
            updates += self._take_given(step.computed[number], plan.work[number], found)
        updates += step.progress()
        invalid, without_choice = result.invalid, result.without_choice
        for number, sequence, drafts in step.outcomes():
            if number in step.void:
                continue
            if sequence.status is SequenceStatus.FINISHED:
                self._discarded_tokens += len(result.token_ids[number])
            elif number in invalid:
                updates += self._fail_invalid(sequence.request)
            elif sequence.request.num_candidates:
                sequence.is_held = True
                updates.append(SequenceUpdate(sequence, candidates=result.candidates[number]))
            elif number in without_choice:
                updates += self.fail_without_choice(sequence.request)
            elif drafts:
                token_ids, logprobs = accepted(result, number, drafts)
                sequence.num_pending_tokens -= len(drafts)
                self._batch.commit_drafts(sequence, len(token_ids) - 1)
                self._append(sequence, token_ids, logprobs, updates)
            else:
                sampled = result.token_ids[number], result.logprobs.get(number)
                if sequence.grammar is None or not self._wait_for_grammar(sequence, sampled):
                    self._append(sequence, *sampled, updates)
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
                sequence.is_held = False
                self._append(sequence, *sampled, updates)
        return updates

    @property
    def has_unread(self) -> bool:
        """True if any sequence waits for its grammar."""
        return bool(self._unread)

    def recover(self, plan: StepPlan) -> None:
        """Undo the step of this plan, which raised. Its requests return to the waiting queue as suspects.

        Steps planned after it read data that it should have written, so they are also void. Settle them as
        usual: their results are ignored and their requests are not blamed. A suspect runs in separate steps
        until it has passed its earlier position; the caller fails a suspect that raises alone.
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
        drafter = self._batch.drafter
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_for=self._batch.waiting_for,
            displaced=self._batch.num_displaced,
            preemptions=self._batch.num_preemptions,
            preempted_tokens=self._batch.preempted_tokens,
            recomputed_tokens=self._batch.recomputed_tokens,
            steps_failed=self._steps_failed,
            invalid_logits=self._num_invalid_logits,
            discarded_tokens=self._discarded_tokens,
            drafted_tokens=drafter.num_drafted,
            accepted_tokens=drafter.num_accepted,
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
            if sequence.status is not SequenceStatus.RUNNING:
                assert sequence.row is None
                assert not sequence.block_ids
                assert sequence.num_computed_tokens == 0
        for request in self._requests.values():
            assert any(s in self._waiting or s in self._batch.sequences for s in request.live_sequences)
            waiting = [s for s in request.live_sequences if s.status is SequenceStatus.WAITING]
            claimed = self._batch.rows.claimed(request)
            together = will_fork(request) or request.labels is not None
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
            victims = self._batch.displace(first, siblings(first), num_displaced)
            for victim in victims:
                self._waiting.enqueue(victim.request)
            num_displaced += len(victims)
            first = self._next_waiting() if self._admit(step, first) else None
        return [sequence for sequence in self._batch.sequences if not is_urgent(sequence)]

    def _next_waiting(self) -> Sequence | None:
        """Return the first waiting sequence that is not on hold."""
        return next((sequence for sequence in self._waiting if not sequence.is_held), None)

    def _admit(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Move a waiting sequence into the batch. Return False if it must wait."""
        if not step.budget or step.is_short:
            self._batch.waiting_for = "kv" if step.is_short else "budget"
            return False
        if not self._batch.admit(step, sequence, siblings(sequence)):
            return False
        self._waiting.discard(sequence)
        self._labeling.entered(sequence)
        return True

    def _schedule_suspects(self, step: StepBuilder) -> None:
        """Run the first runnable suspect in a separate step; if there is none, run the others and admit none."""
        for request in self._suspects:
            self._schedule_running(step, [s for s in self._batch.sequences if s.request is request])
            for sequence in [s for s in request.sequences if s in self._waiting and not s.is_held]:
                if not self._admit(step, sequence):
                    break
            if not step.is_empty:
                return
            step.is_short = False
        self._schedule_running(step, [s for s in self._batch.sequences if s.request not in self._suspects])

    def _preempt_held(self) -> bool:
        """Preempt the last sequence held for candidates, if others might only wait for its row or blocks."""
        held = [s for s in self._batch.sequences if s.is_held and s.request.num_candidates]
        if self._in_flight or not held or self._next_waiting() is None:
            return False
        self._batch.preempt(held[-1])
        self._waiting.enqueue(held[-1].request)
        return True

    def _take_given(self, sequence: Sequence, work: RowWork, found: list[Any]) -> list[SequenceUpdate]:
        """Record log-probabilities of given tokens: the prompt's, or those that end the sequence."""
        if has_nan(found):
            return self._fail_invalid(sequence.request)
        if sequence.scoring is None:
            sequence.request.record_prompt_logprobs(work.first_scored, found)
        elif not sequence.is_finished and (ends := sequence.scoring.take(work, found)) is not None:
            ended, updates = ends
            for each in ended:
                self._end(each)
            self._waiting.enqueue(sequence.request)
            return updates
        return []

    def _wait_for_grammar(self, sequence: Sequence, sampled: Sampled) -> bool:
        """Pass a sampled token to the sequence's grammar. Return True if it is not ready: the sequence is held."""
        assert sequence.grammar is not None
        sequence.grammar.prepare(sampled[0][0])
        if sequence.grammar.is_ready:
            return False
        sequence.is_held = True
        self._unread[sequence] = sampled
        return True

    def _append(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        updates: list[SequenceUpdate],
    ) -> None:
        sequence.num_pending_tokens -= 1
        update = append_sampled(sequence, token_ids, logprobs, self._eos_token_ids)
        self.kv_cache.register_full_blocks(sequence)
        failure = None if sequence.grammar is None else sequence.grammar.failure
        # A grammar fails at EOS if the output requires verification and its schema does not allow it.
        is_at_eos = sequence.finish_reason == "stop" and sequence.stop_reason is None
        if failure is not None and (is_at_eos or sequence.finish_reason is None):
            updates += self._end_request(sequence.request.request_id, "error", str(failure), failure.code)
            return
        if sequence.finish_reason is not None:
            self._end(sequence)
        updates.append(update)

    def _fail_invalid(self, request: Request) -> list[SequenceUpdate]:
        """Fail a request with non-finite logits, and make the blocks it may have corrupted unfindable."""
        live = request.live_sequences
        self._num_invalid_logits += len(live)
        for sequence in live:
            self.kv_cache.forget(sequence)
        return self.fail(request.request_id, "the model's logits were not finite", "output_invalid")

    def fail_without_choice(self, request: Request) -> list[SequenceUpdate]:
        """End a request whose parameters leave no token to choose."""
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
        if request.labels is not None:
            live = [drop_chains(request)]
            live[0].finish_reason = reason
        return [SequenceUpdate(sequence, error=error, error_code=error_code) for sequence in live]

    def _end(self, sequence: Sequence) -> None:
        """Release all resources of a finished sequence."""
        request = sequence.request
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.remove(sequence)
        else:
            self._waiting.discard(sequence)
            self.kv_cache.drop_kept(sequence)
            self._batch.rows.cancel_claim(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.num_pending_tokens = 0
        if request.is_finished:
            del self._requests[request.request_id]
            self._suspects.discard(request)
            self._labeling.forget(request)
        elif len(request.sequences) > 1 and request.labels is None:
            self._waiting.enqueue(request)

    def _retire_settled(self) -> None:
        while self._in_flight and self._in_flight[0].is_settled:
            step = self._in_flight.popleft()
            self.kv_cache.retire(step.plan.step_id)

    def _undo(self, step: InFlightStep) -> None:
        """Return a void step's sequences to the waiting queue, without its pending samples."""
        step.has_failed = True
        self._batch.rows.mark_freed(step.plan.freed_rows, self._batch.sequences)
        for number, sequence in enumerate(step.sampled):
            if not sequence.is_finished and number not in step.void:
                sequence.num_pending_tokens -= 1
        for sequence in dict.fromkeys(step.computed + step.sampled):
            if sequence.status is SequenceStatus.RUNNING:
                self._batch.remove(sequence)
        requests = step.requests()
        if step.plan.state_copies:
            requests += [sequence.request for sequence in self._batch.without_state(step.plan)]
        for request in requests:
            self._waiting.enqueue(request)
