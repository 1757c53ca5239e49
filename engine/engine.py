"""The engine: one loop over plan, launch and collect. One thread owns it, from loading on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, replace
from typing import Literal

from engine.block_watch import BlockWatch
from engine.config import EngineConfig, SchedulerConfig
from engine.engine_stats import StepRecorder
from engine.errors import InvalidRequest, UnsupportedFeature
from engine.input_processor import InputLimits, InputProcessor
from engine.output_processor import OutputProcessor
from engine.outputs import Capacity, EngineStats, KVCacheStats, MemoryUse, RequestOutput, SampleState
from engine.plan import Executor, StepHandle, StepPlan
from engine.sampling_params import MAX_SEED, SamplingParams
from engine.scheduling.request import Request, Sequence, SequenceStatus
from engine.scheduling.scheduler import Scheduler
from engine.structured_output import ChoiceCompiler, ChoiceGrammar
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Tier = Literal["bitwise", "token", "continues"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a loaded model brings: everything the engine needs and does not decide."""

    executor: Executor
    tokenizer: Tokenizer | None
    limits: SchedulerConfig
    served_model: str
    vocab_size: int
    fingerprint: str
    tier: Tier
    device: str
    kv_block_bytes: int = 0
    """Bytes of one KV block over all layers; 0 without a device cache."""
    kv_dtype: str = ""
    weight_bytes: int = 0


class Engine:
    """Continuous batching over a paged KV cache: requests in, deltas out, one step at a time."""

    def __init__(self, parts: EngineParts, *, seed: int = 0) -> None:
        limits = parts.limits
        self.served_model = parts.served_model
        self.fingerprint = parts.fingerprint
        self.tier = parts.tier
        self.tokenizer = parts.tokenizer
        self.limits = limits
        self._device = parts.device
        self._kv_block = (parts.kv_block_bytes, parts.kv_dtype)
        self._memory_bytes = _memory_bytes(parts)
        self._seed = seed
        self._num_added = 0
        self._executor = parts.executor
        self._scheduler = Scheduler(limits)
        self._output_processor = OutputProcessor(
            parts.tokenizer, self._scheduler.finish_sequence, limits.eos_token_ids
        )
        self._in_flight: deque[StepHandle] = deque()
        self._recorder = StepRecorder(limits.max_num_batched_tokens)
        self._kv_of_step: KVCacheStats | None = None
        self._block_watch = BlockWatch(self._scheduler.block_states)
        self._choices: ChoiceCompiler | None = None
        if parts.tokenizer is not None:
            eos = limits.eos_token_ids[0] if limits.eos_token_ids else None
            self._choices = ChoiceCompiler(parts.tokenizer, eos)
        pool_tokens = (limits.num_kv_blocks - 1) * limits.block_size
        self.input_processor = InputProcessor(
            parts.tokenizer,
            InputLimits(parts.vocab_size, limits.max_model_len, pool_tokens, limits.max_num_seqs),
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model. Raises `ConfigError`, mostly `ModelLoadError`."""
        from engine.engine_builder import build_parts  # brings torch, unless the model is echo

        return cls(build_parts(config), seed=config.seed)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceType[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival: float | None = None,
        resume: SequenceType[SampleState] | None = None,
    ) -> None:
        """Take a request that `input_processor.process` has prepared.

        Args:
            priority: lower runs first.
            arrival: orders requests of one priority; any clock, as long as it is one. None: now.
            resume: one state per sample, to go on from as if never interrupted.

        Raises:
            InvalidRequest: it can't run here: see the subclasses. Nothing else is affected.
        """
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens is unresolved: pass the request through input_processor.process")
        request = Request(
            request_id,
            list(prompt_token_ids),
            params,
            seed=self._resolve_seed(params),
            priority=priority,
            arrival=time.time() if arrival is None else arrival,
        )
        for index in range(params.n):
            sequence = Sequence(request, index, logprobs=None if params.logprobs is None else [])
            if resume is not None:
                self._resume(sequence, resume[index])
            sequence.grammar = self._grammar(sequence)
            request.sequences.append(sequence)
        self._scheduler.add_request(request)
        self._output_processor.add(request)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request; its blocks return within a step. An unknown id is no error: it has ended already."""
        self._kv_of_step = None
        return self._output_processor.process(self._scheduler.abort(request_id))

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, collect the oldest one in flight, and tell what came of it."""
        started = time.perf_counter()
        try:
            return self._step(started)
        finally:
            self._recorder.busy_seconds += time.perf_counter() - started

    def _step(self, started: float) -> list[RequestOutput]:
        plan = self._scheduler.schedule()
        scheduled = time.perf_counter()
        self._kv_of_step = None
        if plan is not None:
            self._kv_of_step = kv = self._scheduler.kv_stats()
            self._block_watch.observe()
            try:
                self._in_flight.append(self._executor.launch(plan))
            except Exception as error:
                return self._recover(plan, error)
            self._recorder.planned(plan, kv, scheduled - started)
            if len(self._in_flight) <= self.limits.depth:
                return []
        if not self._in_flight:
            return []
        step = self._in_flight.popleft()
        try:
            result = step.wait()
        except Exception as error:
            return self._recover(step.plan, error)
        waited = time.perf_counter()
        outputs = self._output_processor.process(self._scheduler.update(step.plan, result))
        self._recorder.collected(step.plan, result, time.perf_counter() - waited)
        return outputs

    def has_unfinished(self) -> bool:
        """Whether `step()` has anything left to do, steps in flight included."""
        return bool(self._in_flight) or self._scheduler.has_unfinished()

    def capacity(self) -> Capacity:
        return self._scheduler.capacity()

    def stats(self) -> EngineStats:
        """A snapshot; call it between two steps, on the engine's thread.

        While there is work, the pool is told as the latest step filled it: between two steps the blocks of
        those that just ended are free already, and a pool that is full in every step would look empty.
        """
        texts = self._output_processor.stats
        if not self.has_unfinished():
            self._block_watch.observe()
        return EngineStats(
            kv=self._kv(),
            scheduler=self._scheduler.stats(),
            tier=self.tier,
            fingerprint=self.fingerprint,
            model=self.served_model,
            device=self._device,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            steps=self._recorder.steps,
            last_step_time=self._recorder.last_step_time,
            peak_utilization=self._recorder.peak_utilization,
            prompt_tokens=texts.prompt_tokens,
            computed_tokens=self._recorder.computed_tokens,
            generated_tokens=texts.generated_tokens,
            prompt_tokens_by_source=dict(texts.prompt_tokens_by_source),
            finished=dict(texts.finished),
            invalid_logits=texts.invalid_logits,
            blocks=self._block_watch.latest,
            busy_seconds=self._recorder.busy_seconds,
            memory_bytes=self._memory_bytes,
            histograms=self._recorder.histograms() | texts.histograms() | self._scheduler.histograms(),
        )

    def watch_blocks(self, seconds: float) -> None:
        """Somebody looks at the pool for the next `seconds`: `stats().blocks` is kept fresh until then."""
        self._block_watch.ask(seconds)

    def check_integrity(self) -> None:
        """Recompute every invariant of the bookkeeping; for tests."""
        self._scheduler.check_integrity()

    def _kv(self) -> KVCacheStats:
        kv = self._kv_of_step if self._kv_of_step is not None and self.has_unfinished() else None
        block_bytes, dtype = self._kv_block
        return replace(kv or self._scheduler.kv_stats(), block_bytes=block_bytes, dtype=dtype)

    def _recover(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """The step raised: its requests run again, and one that raised alone a second time fails."""
        request_ids = self._scheduler.request_ids(plan)
        logger.exception(
            "step %d raised; its %d requests run again", plan.step_id, len(request_ids), exc_info=error
        )
        self._scheduler.recover(plan)
        if len(request_ids) != 1 or self._scheduler.num_step_failures(request_ids[0]) < 2:
            return []
        message = f"the step raised {type(error).__name__} with this request alone in it"
        return self._output_processor.process(self._scheduler.fail(request_ids[0], message, "engine_error"))

    def _resolve_seed(self, params: SamplingParams) -> int:
        self._num_added += 1
        if params.seed is not None:
            return params.seed
        # Spread by an odd multiplier, so that neighbouring engine seeds and counters don't meet.
        return (self._seed * 0x9E3779B97F4A7C15 + self._num_added) & MAX_SEED

    @staticmethod
    def _resume(sequence: Sequence, state: SampleState) -> None:
        sequence.output_token_ids = list(state.token_ids)
        if sequence.logprobs is not None:
            sequence.logprobs = list(state.logprobs or [])
        if state.finish_reason is not None:
            sequence.finish_reason = state.finish_reason
            sequence.status = SequenceStatus.FINISHED

    def _grammar(self, sequence: Sequence) -> ChoiceGrammar | None:
        shape = sequence.request.params.structured_outputs
        if shape is None or sequence.is_finished:
            return None
        if self._choices is None or shape.choice is None:
            raise UnsupportedFeature("structured_outputs supports choice only, on a model with a tokenizer")
        grammar = self._choices.compile(shape.choice, sequence.request.prompt_token_ids)
        grammar.replay(sequence.output_token_ids)
        return grammar


def _memory_bytes(parts: EngineParts) -> dict[MemoryUse, int]:
    kv_bytes = parts.kv_block_bytes * parts.limits.num_kv_blocks
    return {"weights": parts.weight_bytes, "kv": kv_bytes} if parts.weight_bytes else {}
