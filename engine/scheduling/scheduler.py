"""Who computes which tokens in the next step, and what became of them when it retired.

There is no prefill phase and no decode phase: each sequence has `num_computed_tokens` chasing `num_tokens`,
and every step hands out one token budget, to running sequences first, then to waiting ones, oldest first. A
decode is a sequence one token behind; a chunked prefill is one further behind than the budget reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.errors import InvalidRequest, NeverFits
from engine.outputs import (
    Capacity,
    FinishReason,
    HistogramSnapshot,
    KVCacheStats,
    LabelValues,
    SchedulerStats,
)
from engine.plan import StepPlan, StepResult
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request, Sequence, SequenceStatus, SequenceUpdate
from engine.scheduling.running_batch import RunningBatch
from engine.scheduling.sequence_queue import SequenceQueue, scheduling_key
from engine.scheduling.step_builder import InFlightStep, StepBuilder
from engine.scheduling.stopping import append_sampled


class Scheduler:
    """Plans steps and retires them. One thread owns it.

    Every plan that `schedule` returns must be settled once, in order, by `update` or by `recover`; only the
    plan of a step that could not even be launched may be recovered while an older one is in flight.

    The oldest running sequence can always be scheduled, by preempting others if need be, so everything that
    `add_request` accepted ends. Victims keep their arrival and all their tokens; their KV is recomputed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self.kv_cache = KVCacheManager(
            config.num_kv_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._batch = RunningBatch(config, self.kv_cache)
        self._waiting = SequenceQueue()
        self._requests: dict[str, Request] = {}
        self._suspects: set[Request] = set()
        """Were in a step that raised, and have not yet got past that point in a step of their own."""
        self._in_flight: deque[InFlightStep] = deque()
        self._num_insertions = 0
        self._next_step_id = 0
        self._steps_failed = 0
        self._discarded_tokens = 0

    def add_request(self, request: Request) -> None:
        """Queue a request with at least one unfinished sequence.

        Raises NeverFits if the pool or the rows could not hold it even alone, InvalidRequest if its id is in
        use or there is nothing left to generate.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id!r} is already running")
        request.max_num_tokens = min(
            len(request.prompt_token_ids) + request.max_tokens, self._config.max_model_len
        )
        live = request.live_sequences
        if not live or any(sequence.num_known_tokens >= request.max_num_tokens for sequence in live):
            raise InvalidRequest(f"request {request.request_id!r} has nothing left to generate")
        self._check_fits(request, len(live))
        request.insertion = self._num_insertions
        self._num_insertions += 1
        self._requests[request.request_id] = request
        self._enqueue(request)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """End a request now; its blocks come back once no step in flight names them. Unknown id: []."""
        return self._end_request(request_id, "abort", None, None)

    def fail(self, request_id: str, message: str, code: str) -> list[SequenceUpdate]:
        """End a request with an error. Unknown id: []."""
        return self._end_request(request_id, "error", message, code)

    def finish_sequence(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence for a reason found outside, such as a stop string. No-op if it has ended already."""
        if not sequence.is_finished:
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None: nothing can run before a step in flight retires or a request arrives."""
        unsettled = sum(not step.is_settled for step in self._in_flight)
        assert unsettled <= self._config.depth, f"{unsettled} steps in flight"
        step = StepBuilder(self._next_step_id, self._config.max_num_batched_tokens)
        if self._suspects:
            self._schedule_suspects(step)
        else:
            self._schedule_running(step, self._batch.sequences)
            while self._waiting and self._admit(step, self._waiting.first):
                pass
        if step.is_empty:
            return None
        self._next_step_id += 1
        planned = step.build(self._batch.take_freed_rows())
        self._in_flight.append(planned)
        return planned.plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Retire the oldest step in flight: append what it sampled, end what has ended.

        A row that computed a chunk of its prompt gets an update without tokens. What was sampled for a
        sequence that has ended meanwhile is discarded; for one that was preempted meanwhile it counts.
        """
        step = self._in_flight[0]
        assert step.plan.step_id == plan.step_id == result.step_id, (
            "steps retire in the order they were planned"
        )
        step.is_settled = True
        self._retire_settled()
        if step.has_failed:
            return []
        for number, entries in result.prompt_logprobs.items():
            step.computed[number].request.record_prompt_logprobs(plan.work[number].start + 1, entries)
        sampled = set(step.sampled)
        updates = [
            SequenceUpdate(sequence)
            for sequence in step.computed
            if sequence not in sampled and sequence.status is SequenceStatus.RUNNING
        ]
        for number, sequence in enumerate(step.sampled):
            token_ids = result.token_ids[number]
            if sequence.is_finished:
                self._discarded_tokens += len(token_ids)
                continue
            sequence.num_pending_tokens -= 1
            if number in result.invalid:
                updates += self._fail_invalid(sequence.request)
            else:
                updates += self._append(sequence, number, result)
        self._clear_suspects(step)
        return updates

    def recover(self, plan: StepPlan) -> None:
        """The step of this plan raised: it never happened. Its requests wait again, as suspects.

        Steps planned after it read what it was to write, so they are void as well; settle them as usual,
        their results are ignored and their requests are not blamed. A suspect gets steps of its own until it
        has got past where it was; the caller fails one that raises alone.
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
        for request in failed.requests():
            if not request.is_finished:
                request.num_step_failures += 1
                self._suspects.add(request)
        self.kv_cache.drop_unproven(plan.step_id)
        self._retire_settled()
        for step in void:
            if not step.has_failed:
                self._undo(step)

    def request_ids(self, plan: StepPlan) -> list[str]:
        """Whom to blame if this step raises: the requests in it, none if it is void. Ask before `recover`."""
        for step in self._in_flight:
            if step.plan is plan and not step.has_failed:
                return [request.request_id for request in step.requests()]
        return []

    def num_step_failures(self, request_id: str) -> int:
        """Steps that raised with this request in them; 0 for one that has ended."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_step_failures

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._batch.sequences)

    @property
    def num_waiting(self) -> int:
        """Requests with a sequence that waits for blocks, a row or budget."""
        return self._waiting.num_requests

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_for=self._batch.waiting_for,
            preemptions=self._batch.preemptions,
            preempted_tokens=self._batch.preempted_tokens,
            steps_failed=self._steps_failed,
            discarded_tokens=self._discarded_tokens,
        )

    def kv_stats(self) -> KVCacheStats:
        return self.kv_cache.stats()

    def block_states(self) -> bytes:
        """A letter per KV block, as in `BlockMap.states`."""
        return self.kv_cache.pool.states()

    def histograms(self) -> dict[str, dict[LabelValues, HistogramSnapshot]]:
        """How long KV blocks live, lie idle and are reused."""
        return self.kv_cache.pool.residency.histograms()

    def capacity(self) -> Capacity:
        return Capacity(
            free_rows=self._batch.num_unclaimed_rows,
            available_blocks=self._batch.num_admissible_blocks,
            block_size=self._config.block_size,
            waiting=self.num_waiting,
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
            if sequence.status is SequenceStatus.WAITING:
                request = sequence.request
                follows = self._will_fork(request) and sequence is not request.live_sequences[0]
                assert (sequence in self._waiting) != (follows or self._batch.is_sibling(sequence))
        assert all(request.request_id in self._requests for request in self._suspects)

    def _check_fits(self, request: Request, num_sequences: int) -> None:
        if num_sequences > self._config.max_num_seqs:
            raise NeverFits(
                f"{num_sequences} samples need as many rows, there are {self._config.max_num_seqs}"
            )
        # The last token is never written; full prompt blocks are shared, the rest is each sample's own.
        num_blocks = self.kv_cache.blocks_for(request.max_num_tokens - 1)
        num_shared = len(request.prompt_token_ids) // self._config.block_size if num_sequences > 1 else 0
        needed = num_shared + num_sequences * (num_blocks - num_shared)
        usable = self._config.num_kv_blocks - 1
        if needed > usable:
            raise NeverFits(
                f"{num_sequences} x {request.max_num_tokens} tokens need {needed} KV blocks of "
                f"{self._config.block_size}, the pool has {usable}"
            )

    def _enqueue(self, request: Request) -> None:
        """Queue a request's waiting sequences: the first alone if the others will fork off it."""
        waiting = [s for s in request.sequences if s.status is SequenceStatus.WAITING]
        for sequence in waiting:
            self._waiting.discard(sequence)
        for sequence in waiting[:1] if self._will_fork(request) else waiting:
            if not self._batch.is_sibling(sequence):
                self._waiting.add(sequence)

    def _will_fork(self, request: Request) -> bool:
        """Whether several samples start out equal: all wait, and none has a token, known or in flight."""
        live = request.live_sequences
        return len(live) > 1 and all(
            s.status is SequenceStatus.WAITING and not s.output_token_ids and not s.num_pending_tokens
            for s in live
        )

    def _schedule_running(self, step: StepBuilder, candidates: Iterable[Sequence]) -> None:
        for victim in self._batch.schedule(step, candidates):
            self._enqueue(victim.request)

    def _admit(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Move a waiting sequence into the batch. False: not now."""
        if not step.budget or step.is_short:
            self._batch.waiting_for = "kv" if step.is_short else "budget"
            return False
        request = sequence.request
        siblings = request.live_sequences[1:] if self._will_fork(request) else []
        if not self._batch.admit(step, sequence, siblings):
            return False
        self._waiting.discard(sequence)
        return True

    def _schedule_suspects(self, step: StepBuilder) -> None:
        """Give the first suspect that can run a step of its own; if none can, run the others, admit none."""
        for request in sorted(self._suspects, key=lambda r: scheduling_key(r.sequences[0])):
            self._schedule_running(step, [s for s in self._batch.sequences if s.request is request])
            for sequence in [s for s in request.sequences if s in self._waiting]:
                if not self._admit(step, sequence):
                    break
            if not step.is_empty:
                return
            step.is_short = False
        self._schedule_running(step, [s for s in self._batch.sequences if s.request not in self._suspects])

    def _append(self, sequence: Sequence, number: int, result: StepResult) -> list[SequenceUpdate]:
        update = append_sampled(
            sequence, result.token_ids[number], result.logprobs.get(number), self._eos_token_ids
        )
        self.kv_cache.register_full_blocks(sequence)
        failure = None if sequence.grammar is None else sequence.grammar.failure
        if sequence.finish_reason is not None:
            self._end(sequence)
        elif failure is not None:
            return self._end_request(sequence.request.request_id, "error", str(failure), failure.code)
        return [update]

    def _fail_invalid(self, request: Request) -> list[SequenceUpdate]:
        """Logits were not finite: the request fails, and nothing it may have spoilt is found again."""
        for sequence in request.live_sequences:
            self.kv_cache.forget(sequence)
        return self._end_request(
            request.request_id, "error", "the model's logits were not finite", "output_invalid"
        )

    def _end_request(
        self, request_id: str, reason: FinishReason, error: str | None, error_code: str | None
    ) -> list[SequenceUpdate]:
        request = self._requests.get(request_id)
        updates = []
        for sequence in request.live_sequences if request is not None else ():
            sequence.finish_reason = reason
            self._end(sequence)
            updates.append(SequenceUpdate(sequence, error=error, error_code=error_code))
        return updates

    def _end(self, sequence: Sequence) -> None:
        """Give back all that an ended sequence holds."""
        request = sequence.request
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.remove(sequence)
        else:
            self._waiting.discard(sequence)
            self._batch.forget_sibling(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.num_pending_tokens = 0
        if request.is_finished:
            del self._requests[request.request_id]
            self._suspects.discard(request)
        elif len(request.sequences) > 1:
            self._enqueue(request)

    def _retire_settled(self) -> None:
        while self._in_flight and self._in_flight[0].is_settled:
            self.kv_cache.retire(self._in_flight.popleft().plan.step_id)

    def _undo(self, step: InFlightStep) -> None:
        """Send a void step's sequences back to waiting, without the tokens it was to sample."""
        step.has_failed = True
        self._batch.mark_freed(step.plan.freed_rows)
        for sequence in step.sampled:
            if not sequence.is_finished:
                sequence.num_pending_tokens -= 1
        for sequence in dict.fromkeys(step.computed + step.sampled):
            if sequence.status is SequenceStatus.RUNNING:
                self._batch.remove(sequence)
        for request in step.requests():
            self._enqueue(request)

    def _clear_suspects(self, step: InFlightStep) -> None:
        """A suspect that sampled in a step of its own, and is caught up, has got past its failure."""
        if not self._suspects or not step.sampled:
            return
        requests = step.requests()
        for request in self._suspects.intersection(requests):
            if len(requests) == 1 and all(
                s.num_computed_tokens >= s.num_known_tokens - 1 for s in request.live_sequences
            ):
                self._suspects.discard(request)
