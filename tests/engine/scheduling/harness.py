"""Drives a `Scheduler` with a `HashModel` like the engine's step loop, with checks after each call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pagemill.engine.beam_search import BeamSearches
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.outputs import FinishReason
from pagemill.engine.plan import StepPlan, StepResult, TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Grammar, Request, Sequence, SequenceStatus, SequenceUpdate
from pagemill.engine.scheduling.scheduler import Scheduler
from pagemill.engine.scheduling.sequence_queue import scheduling_key
from tests.engine.scheduling.hash_model import BadStep, HashModel, HashOracle, HashStep


def make_config(**changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "block_size": 4,
        "num_kv_blocks": 65,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "watermark_ratio": 0.0,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt: Iterable[int],
    *,
    seed: int = 0,
    priority: int = 0,
    arrival: float = 0.0,
    grammar: Callable[[int], Grammar] | None = None,
    **params: object,
) -> Request:
    """A request as the engine builds it; greedy and 8 tokens long unless specified otherwise."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))  # type: ignore[arg-type]
    request = Request(request_id, list(prompt), sampling, seed, priority, arrival)
    request.sequences = [
        Sequence(request, index, grammar=None if grammar is None else grammar(index))
        for index in range(sampling.num_sequences)
    ]
    return request


PROMPT = [5, 6, 7, 8, 9, 10, 11]
"""Two blocks of four, the second not full."""


def result(plan: StepPlan, *token_ids: int, invalid: frozenset[int] = frozenset()) -> StepResult:
    """A step's sampled tokens, dictated by the test."""
    return StepResult(plan.step_id, [[token] for token in token_ids], invalid=invalid)


def tokens_by_row(plan: StepPlan) -> dict[int, int]:
    return {work.row: work.num_tokens for work in plan.work}


def expected(harness: Harness, request: Request, index: int = 0) -> tuple[list[int], str]:
    """The oracle's output and finish reason for one sample."""
    limit = len(request.prompt_token_ids) + request.max_tokens
    return harness.oracle.generate(request.prompt_token_ids, request.params, request.seed, index, limit)


def schedule(harness: Harness) -> StepPlan:
    plan = harness.schedule()
    assert plan is not None
    return plan


class ScriptGrammar:
    """A simulated grammar: three tokens may follow each state, some force up to two more, then it is complete.

    `delay`: the number of calls, for each token, until it is ready.
    """

    def __init__(self, script: int, length: int, vocab_size: int, delay: int = 0) -> None:
        self._state, self._left, self._vocab_size = script, length, vocab_size
        self._delay, self._asked = delay, 0

    def prepare(self, token_id: int) -> None:
        self._asked = self._state % (self._delay + 1)

    @property
    def is_ready(self) -> bool:
        self._asked -= 1
        return self._asked < 0

    def allowed_token_ids(self) -> list[int]:
        return sorted({hash((self._state, branch)) % self._vocab_size for branch in range(3)})

    @property
    def may_sample_again(self) -> bool:
        return self._left > 1

    def advance(self, token_id: int) -> list[int]:
        assert token_id in self.allowed_token_ids()
        self._state = hash((self._state, token_id))
        self._left -= 1
        return [(self._state + extra) % self._vocab_size for extra in range(self._state % 3)]

    @property
    def is_complete(self) -> bool:
        return self._left <= 0

    def token_mask(self) -> None:
        return None

    @property
    def failure(self) -> None:
        return None


@dataclass
class Harness:
    """`step()` is the engine's: plan, launch, and retire the oldest step once `depth` are in flight."""

    config: SchedulerConfig
    oracle: HashOracle = field(default_factory=HashOracle)
    scheduler: Scheduler = field(init=False)
    searches: BeamSearches = field(init=False)
    model: HashModel = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """Failed request -> error code."""
    bad_launches: set[int] = field(default_factory=set)
    logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    """The updates so far, by sequence."""
    _in_flight: deque[HashStep] = field(default_factory=deque)

    def __post_init__(self) -> None:
        config = self.config
        self.scheduler = Scheduler(config)
        self.searches = BeamSearches(self.scheduler, config.eos_token_ids)
        self.model = HashModel(
            config.num_kv_blocks,
            config.block_size,
            self.oracle,
            config.max_num_seqs,
            windows=config.kv_windows,
            is_recurrent=config.state_bytes > 0,
        )

    def add(self, request: Request) -> Request:
        self.searches.add(request)
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.check()
        return request

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        updates = self.searches.drive(self.scheduler.abort(request_id))
        self.check()
        return updates

    def step(self) -> list[SequenceUpdate]:
        read = self.scheduler.read_on()
        self._note_logprobs(read)
        self.check()
        return read + self._step()

    def _step(self) -> list[SequenceUpdate]:
        plan = self.schedule()
        if plan is not None and plan.step_id in self.bad_launches:
            self.recover(plan)
            return []
        if plan is not None:
            self._in_flight.append(self.model.launch(plan))
            if len(self._in_flight) <= self.config.depth:
                return []
        is_stuck = not self._in_flight and self.scheduler.has_unfinished() and not self.scheduler.has_unread
        assert not is_stuck, "nothing runs and nothing can"
        updates = self.retire() if self._in_flight else []
        if plan is not None and plan.samples_later:
            updates += self._sample_later(plan)
        return updates

    def _sample_later(self, plan: StepPlan) -> list[SequenceUpdate]:
        updates = self.scheduler.read_on()
        self._note_logprobs(updates)
        if self.scheduler.constrain(plan):
            self._in_flight[-1].sample()
        self.check()
        return updates

    def _note_logprobs(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.logprobs.setdefault(update.sequence, []).extend(update.new_logprobs or ())

    def schedule(self) -> StepPlan | None:
        live = [s for request in self.requests.values() for s in request.live_sequences]
        running = {s.request for s in live if s.status is SequenceStatus.RUNNING}
        waiting = [s for s in live if s.request not in running]
        plan = self.scheduler.schedule()
        self.check(plan)
        if plan is not None:
            self.plans.append(plan)
            self._check_plan(plan, waiting)
        return plan

    def retire(self) -> list[SequenceUpdate]:
        step = self._in_flight.popleft()
        try:
            result = step.wait()
        except BadStep:
            self.recover(step.plan)
            return []
        updates = self.update(step.plan, result)
        self._note_logprobs(updates)
        self.check()
        for update in updates:
            if update.error_code is not None:
                self.errors[update.sequence.request.request_id] = update.error_code
        return updates

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        return self.searches.drive(self.scheduler.update(plan, result))

    def recover(self, plan: StepPlan) -> None:
        """Like the engine: retry, and fail the request that raises alone a second time."""
        request_ids = self.scheduler.request_ids(plan)
        self.scheduler.recover(plan)
        self.check()
        if len(request_ids) == 1 and self.requests[request_ids[0]].num_step_failures > 1:
            updates = self.scheduler.fail(request_ids[0], "the step raised", "engine_error")
            for update in self.searches.drive(updates):
                self.errors[update.sequence.request.request_id] = "engine_error"
            self.check()

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished() and not self._in_flight:
                break
            self.step()
        else:
            raise AssertionError(f"unfinished after {max_steps} steps: {self.scheduler.stats()}")
        self.check_idle()

    def check(self, plan: StepPlan | None = None) -> None:
        """Integrity, the four states, and poison for free blocks: a step in flight must not need them.

        `plan` is about to be launched.
        """
        self.scheduler.check_integrity()
        stats = self.scheduler.kv_cache.stats()
        states = stats.free_blocks, stats.cached_blocks, stats.active_blocks, stats.reserved_blocks
        assert sum(states) == stats.capacity_blocks == self.config.num_kv_blocks
        pool, running = self.scheduler.kv_cache.pool, self.scheduler.num_running
        assert running <= self.config.max_num_seqs
        assert stats.cached_state_slots <= self.config.num_cached_states
        leaving = {block_id for block_id, _ in plan.host_stores} if plan is not None else set()
        leaving.update(self.scheduler.kv_cache.host.outgoing_blocks())
        free = {block.block_id for block in pool.free_queue() if block.block_hash is None}
        self.model.poison(sorted(free - leaving))

    def check_idle(self) -> None:
        stats = self.scheduler.kv_cache.stats()
        assert stats.active_blocks == stats.shared_blocks == stats.block_references == stats.filled_slots == 0
        assert stats.reserved_blocks == 1
        assert self.scheduler.capacity().free_rows == self.config.max_num_seqs
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def check_outputs(self, expected: dict[str, list[tuple[list[int], FinishReason]]]) -> None:
        """Every sample of every request that did not fail or abort equals the oracle's."""
        for request_id, samples in expected.items():
            got = [(s.output_token_ids, s.finish_reason) for s in self.requests[request_id].sequences]
            assert got == samples, request_id

    def _check_plan(self, plan: StepPlan, waiting: list[Sequence]) -> None:
        """`waiting`: sequences of requests that had nothing running before this plan."""
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        if self.scheduler.stats().steps_failed:
            return  # suspects go first
        entered = [s for s in waiting if s.status is SequenceStatus.RUNNING]
        if entered:
            requests, last = {s.request for s in entered}, max(map(scheduling_key, entered))
            behind = [s for s in waiting if s.request not in requests and not s.num_pending_tokens]
            assert all(scheduling_key(s) > last for s in behind), "admitted out of order"
        if self.config.depth == 0:
            running = [s for r in self.requests.values() for s in r.sequences if s.row is not None]
            running = [s for s in running if not s.is_held]
            rows = {work.row for work in plan.work}
            assert not running or min(running, key=scheduling_key).row in rows, "the oldest was passed over"
