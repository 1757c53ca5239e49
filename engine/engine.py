"""The engine: one loop over plan, launch and collect. Owned by one thread from loading on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as SequenceType
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.pool import AdapterPool, NoAdapters
from pagemill.engine.block_watch import BlockWatch
from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.device_failure import tells_of_lost_device
from pagemill.engine.engine_stats import StepRecorder
from pagemill.engine.errors import DeviceLost, EngineError, InvalidRequest, UnsupportedFeature
from pagemill.engine.outputs import (
    Capacity,
    EngineStats,
    KVCacheStats,
    LoadedModel,
    RequestOutput,
    SampleState,
)
from pagemill.engine.parts import EngineParts, Tier
from pagemill.engine.plan import StepHandle, StepPlan
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus
from pagemill.engine.scheduling.scheduler import Scheduler
from pagemill.engine.structured_output.grammars import MASK_WAIT_S, Grammars
from pagemill.engine.tasks import GENERATE, Generate, Score, Task
from pagemill.engine.text.best_of import BestOf
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.output_processor import OutputProcessor
from pagemill.engine.text.token_texts import TokenTexts
from pagemill.engine.text.tokenizer import Tokenizer
from pagemill.sampling_fields import MAX_SEED

if TYPE_CHECKING:
    from pagemill.engine.models.directory import LocalModel

logger = logging.getLogger(__name__)

_ADAPTER_WAIT_S = 0.01
_SCHEMA_WAIT_S = 0.01
"""The longest that a step with no other work waits for a schema."""


class Engine:
    """Continuous batching over a paged KV cache: requests in, deltas out, one step at a time."""

    def __init__(self, parts: EngineParts, *, seed: int = 0) -> None:
        limits = parts.limits
        self._parts = parts
        self._seed = seed
        self._num_added = 0
        self._token_texts = TokenTexts(parts.tokenizer)
        self._scheduler = Scheduler(limits)
        self._output_processor = OutputProcessor(
            parts.tokenizer, self._scheduler.finish_sequence, limits.eos_token_ids
        )
        self._in_flight: deque[StepHandle] = deque()
        self._lost: DeviceLost | None = None
        self._adapted: dict[str, Request] = {}
        """The requests with an adapter; those without a slot are in none of the scheduler's queues."""
        self._recorder = StepRecorder(limits.max_num_batched_tokens)
        self._kv_of_step: KVCacheStats | None = None
        self._planning_s = 0.0
        self._loaded = LoadedModel(
            parts.served_models[0],
            parts.device,
            parts.tier,
            parts.fingerprint,
            limits.max_model_len,
            limits.max_num_seqs,
        )
        self._block_watch = BlockWatch(self._scheduler.kv_cache.pool.states)
        self._grammars = Grammars(parts.tokenizer, self._token_texts, parts.vocab_size, limits.eos_token_ids)
        pool_tokens = (limits.num_kv_blocks - 1) // len(limits.kv_windows) * limits.block_size
        self.input_processor = InputProcessor(
            parts.tokenizer,
            InputLimits(
                parts.vocab_size,
                limits.max_model_len,
                pool_tokens,
                limits.max_num_seqs,
                limits.eos_token_ids,
            ),
            tool_call_parser=parts.tool_call_parser,
            reasoning_parser=parts.reasoning_parser,
        )

    @property
    def served_models(self) -> tuple[str, ...]:
        """The names that jobs may use, the main one first."""
        return self._parts.served_models

    @property
    def fingerprint(self) -> str:
        """Identifies what computed a checkpoint: weights, dtype, quantisation and device class."""
        return self._parts.fingerprint

    @property
    def model_parts(self) -> str:
        """The description of how each part of the model runs, as the start logs it."""
        return self._parts.model_parts

    @property
    def tier(self) -> Tier:
        return self._parts.tier

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    @property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens. Safe on any thread."""
        return self._token_texts

    @property
    def adapters(self) -> AdapterPool | NoAdapters:
        """The adapters that requests may name. Its names are safe on any thread."""
        return self._parts.adapters

    @property
    def limits(self) -> SchedulerConfig:
        return self._parts.limits

    @classmethod
    def from_config(cls, config: EngineConfig, model: LocalModel | None = None) -> Engine:
        """Load the model, whose files may have been found. Raises `ConfigError`, mostly `ModelLoadError`."""
        from pagemill.engine.builder import build_parts  # imports torch, unless the model is echo

        return cls(build_parts(config, model), seed=config.seed)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceType[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival: float | None = None,
        resume: SequenceType[SampleState] | None = None,
        cache_salt: str = "",
        task: Task = GENERATE,
        adapter: Adapter | None = None,
    ) -> None:
        """Add a request that `input_processor.process` has prepared.

        Args:
            priority: lower runs first.
            arrival: orders requests of equal priority; any clock, used consistently. None: now.
            resume: one state per sample, to continue from as if never interrupted. best_of and beam search have no
                intermediate state to continue from.
            cache_salt: only requests with the same salt share prefix cache blocks, so that timing does not reveal
                what others have sent.
            task: the request's purpose; `params` of a `Score` set the number of alternatives per position.
            adapter: one that `adapters.find` returned.

        Raises:
            InvalidRequest: it can't run here: see the subclasses. Nothing else is affected.
        """
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens is unresolved: pass the request through input_processor.process")
        # `process` has checked them, but a caller may skip it, and a checkpoint comes from outside.
        self.input_processor.check_token_ids("prompt_token_ids", prompt_token_ids)
        for state in resume or ():
            self.input_processor.check_token_ids("resume", state.token_ids)
        if resume is not None and params.is_ranked:
            raise InvalidRequest("best_of and a beam search start from the prompt: they take no resume")
        self._check_task(task, params)
        best_of = None
        if params.is_ranked and params.beam_width is None:
            best_of = BestOf(params.n, with_logprobs=params.logprobs is not None)
            params = replace(params, logprobs=params.logprobs or 0)  # needed for their ranking
        request = Request(
            request_id,
            list(prompt_token_ids),
            params,
            seed=self._resolve_seed(params),
            priority=priority,
            arrival=time.time() if arrival is None else arrival,
            cache_salt=cache_salt if adapter is None else f"{cache_salt}\0{adapter.digest}",
            bad_word_ids=self.input_processor.bad_word_ids(params.bad_words),
            task=task,
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)
        for index in range(params.num_sequences):
            has_logprobs = params.beam_width is not None and params.logprobs is not None
            sequence = Sequence(request, index, logprobs=[] if has_logprobs else None)
            if isinstance(task, Score):
                sequence.continuation = tuple(task.continuations[index])
                sequence.output_token_ids, sequence.logprobs = list(sequence.continuation[:-1]), []
            if resume is not None:
                self._resume(sequence, resume[index])
            request.sequences.append(sequence)
        self._begin(request, adapter)
        self._output_processor.add(request, best_of)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request; its blocks return within a step. An unknown id is ignored: it has already ended."""
        self._kv_of_step = None
        waiting = self._grammars.withdraw(request_id)
        if self._adapted and (request := self._let_go(request_id)) is not None and request.adapter_slot < 0:
            waiting = request
        if waiting is not None:
            return self._output_processor.end(waiting, "abort")
        return self._output_processor.process(self._scheduler.abort(request_id))

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, collect the oldest one in flight, and return its outputs.

        Raises:
            DeviceLost: the device, or a process of a model spread over several, died. Every further step raises it
                too.
        """
        outputs = self._take_prepared()
        with self._recorder.stepping():
            plan = self._plan()
            if plan is not None:
                outputs += self._launch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) > self.limits.depth):
                outputs += self._collect(self._in_flight.popleft())
        if self._adapted:
            for output in outputs:
                if output.finished:
                    self._let_go(output.request_id)
        return outputs

    def _take_prepared(self) -> list[RequestOutput]:
        """Take what was prepared in the background: compiled schemas, and masks for the next tokens."""
        if self._lost is not None:
            raise self._lost
        outputs = self._take_adapted() if self._adapted else []
        outputs += self._take_compiled() if self._grammars else []
        if self._scheduler.has_unread:
            self._grammars.wait_for_masks()
            outputs += self._output_processor.process(self._scheduler.read_on())
        return outputs

    def _plan(self) -> StepPlan | None:
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        self._planning_s = time.perf_counter() - started
        self._kv_of_step = None
        if plan is None and not self._in_flight and self._scheduler.has_unread:
            self._grammars.pump(MASK_WAIT_S)
        return plan

    def _launch(self, plan: StepPlan) -> list[RequestOutput]:
        self._kv_of_step = kv = self._scheduler.kv_cache.stats()
        self._block_watch.observe()
        try:
            self._in_flight.append(self._parts.executor.launch(plan))
        except Exception as error:
            return self._recover(plan, error)
        self._recorder.planned(plan, kv, self._planning_s)
        return []

    def _collect(self, step: StepHandle) -> list[RequestOutput]:
        """Wait for a step, and retire it."""
        try:
            result = step.wait()
        except Exception as error:
            return self._recover(step.plan, error)
        waited = time.perf_counter()
        updates = self._scheduler.update(step.plan, result)
        if self._scheduler.has_unread:
            self._grammars.pump(0.0)  # their masks are computed while the texts are
        outputs = self._output_processor.process(updates)
        self._recorder.collected(step.plan, result, time.perf_counter() - waited)
        return outputs

    def has_unfinished(self) -> bool:
        """True if `step()` has work left, including steps in flight."""
        is_held = bool(self._grammars) or any(request.adapter_slot < 0 for request in self._adapted.values())
        return bool(self._in_flight) or self._scheduler.has_unfinished() or is_held

    def capacity(self) -> Capacity:
        return self._scheduler.capacity()

    def stats(self) -> EngineStats:
        """Return a snapshot; call it between two steps, on the engine's thread.

        While there is work, the pool is reported as the latest step filled it: between two steps the blocks
        of sequences that just ended are already free, and a pool that is full in every step would look empty.
        """
        texts = self._output_processor.stats
        if not self.has_unfinished():
            self._block_watch.observe()
        return EngineStats(
            kv=self._kv(),
            scheduler=self._scheduler.stats(),
            loaded=self._loaded,
            steps=replace(self._recorder.stats),
            requests=deepcopy(texts.requests),
            grammars=self._grammars.stats(),
            adapters=self._parts.adapters.stats(),
            memory_bytes=self._parts.memory_bytes(),
            blocks=self._block_watch.latest,
            histograms=self._recorder.histograms()
            | texts.histograms()
            | self._scheduler.kv_cache.pool.residency.histograms()
            | self._grammars.histograms(),
        )

    def failure(self) -> str | None:
        """The process that died, of a model spread over several; None if all are alive. Safe on any thread."""
        return self._parts.ranks.failure() if self._parts.ranks is not None else None

    def close(self) -> None:
        """Free the device's memory, and end the processes of a model spread over several. Don't step after it."""
        if self._parts.ranks is not None:
            self._parts.ranks.close()
        self._in_flight.clear()
        self._parts.executor.close()
        self._parts = replace(self._parts, adapters=NoAdapters("the engine is closed"))
        self._lost = self._lost or DeviceLost("the engine is closed")

    def load_grammar_vocabulary(self) -> None:
        """Start preparing for regex, JSON and grammar outputs now instead of at the first such request."""
        self._grammars.load_vocabulary()

    def watch_blocks(self, seconds: float) -> None:
        """Keep `stats().blocks` fresh for the next `seconds`, for a viewer of the pool."""
        self._block_watch.ask(seconds)

    def check_integrity(self) -> None:
        """Recompute every invariant of the bookkeeping; for tests."""
        self._scheduler.check_integrity()

    def _kv(self) -> KVCacheStats:
        kv = self._kv_of_step if self._kv_of_step is not None and self.has_unfinished() else None
        parts = self._parts
        return replace(
            kv or self._scheduler.kv_cache.stats(), block_bytes=parts.kv_block_bytes, dtype=parts.kv_dtype
        )

    def _recover(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """Recover from a step that raised: its requests run again, and one that raises alone a second time
        fails.

        Raises `DeviceLost` if the device can't run anything again.
        """
        if (lost := self._as_device_lost(error)) is not None:
            # A device reports errors late: any step not yet collected may have caused this one.
            plans = [plan, *(step.plan for step in self._in_flight)]
            lost.request_ids = frozenset(name for each in plans for name in self._scheduler.request_ids(each))
            self._lost = lost
            raise lost
        request_ids = self._scheduler.request_ids(plan)
        logger.exception(
            "step %d raised; its %d requests run again", plan.step_id, len(request_ids), exc_info=error
        )
        self._scheduler.recover(plan)
        if len(request_ids) != 1 or self._scheduler.num_step_failures(request_ids[0]) < 2:
            return []
        message = f"the step raised {type(error).__name__} with this request alone in it"
        return self._output_processor.process(self._scheduler.fail(request_ids[0], message, "engine_error"))

    def _as_device_lost(self, error: Exception) -> DeviceLost | None:
        if isinstance(error, DeviceLost):
            return error
        if not tells_of_lost_device(error) and self._parts.executor.is_device_alive():
            return None
        logger.error("a step raised, and the device runs nothing any more", exc_info=error)
        reason = (str(error).splitlines() or [""])[0]
        lost = DeviceLost(f"the device is lost: {type(error).__name__}: {reason}")
        lost.__cause__ = error
        return lost

    def _resolve_seed(self, params: SamplingParams) -> int:
        self._num_added += 1
        if params.seed is not None:
            return params.seed
        # Spread by an odd multiplier, so that neighbouring engine seeds and counters don't collide.
        return (self._seed * 0x9E3779B97F4A7C15 + self._num_added) & MAX_SEED

    def _check_task(self, task: Task, params: SamplingParams) -> None:
        """Raise InvalidRequest for a task that does not go with the parameters."""
        if isinstance(task, Score):
            if len(task.continuations) != params.n or not all(task.continuations):
                raise InvalidRequest("a score takes one continuation per sample, none of them empty")
            for continuation in task.continuations:
                self.input_processor.check_token_ids("continuations", continuation)
        if params.label_probs is not None and isinstance(task, Generate) and task.outline is not None:
            raise UnsupportedFeature(
                "label_probs: the model would think or call functions before the label; switch its thinking off, for "
                "most models with chat_template_kwargs enable_thinking false"
            )

    @staticmethod
    def _resume(sequence: Sequence, state: SampleState) -> None:
        if not sequence.continuation:
            sequence.output_token_ids = list(state.token_ids)
        if state.finish_reason is not None:
            sequence.finish_reason = state.finish_reason
            sequence.status = SequenceStatus.FINISHED

    def _begin(self, request: Request, adapter: Adapter | None) -> None:
        """Hand a request on, or hold it while its adapter is read. Raises `EngineError`."""
        if request.request_id in self._grammars or request.request_id in self._adapted:
            raise InvalidRequest(f"request {request.request_id!r} is already running")
        if adapter is None:
            self._enqueue(request)
        else:
            slot = self._parts.adapters.attach(request.request_id, adapter)
            self._adapted[request.request_id] = request
            self._take_slot(request, slot)

    def _enqueue(self, request: Request) -> None:
        """Hand a request to the scheduler once its grammars are there. Raises `EngineError`."""
        if self._grammars.attach(request):
            self._scheduler.add_request(request)

    def _take_slot(self, request: Request, slot: int | None) -> None:
        if slot is None:
            return
        request.adapter_slot = slot
        try:
            self._enqueue(request)
        except EngineError:
            self._let_go(request.request_id)
            raise

    def _let_go(self, request_id: str) -> Request | None:
        """Let go of the adapter of a request, if it has one."""
        self._parts.adapters.release(request_id)
        return self._adapted.pop(request_id, None)

    def _take_adapted(self) -> list[RequestOutput]:
        """Admit requests whose adapter is in memory; returns the ends of those whose adapter can't be loaded."""
        is_idle = not self._in_flight and not self._scheduler.has_unfinished()
        outputs = []
        for request_id, slot in self._parts.adapters.ready(_ADAPTER_WAIT_S if is_idle else 0.0):
            request = self._adapted[request_id]
            try:
                if isinstance(slot, EngineError):
                    raise slot
                self._take_slot(request, slot)
            except EngineError as failure:
                outputs += self._output_processor.end(request, "error", str(failure), failure.code)
        return outputs

    def _take_compiled(self) -> list[RequestOutput]:
        """Admit requests whose schema has been compiled; returns the ends of those whose schema failed."""
        is_idle = not self._in_flight and not self._scheduler.has_unfinished()
        outputs = []
        for request, error in self._grammars.compiled(_SCHEMA_WAIT_S if is_idle else 0.0):
            try:
                if error is not None:
                    raise error
                self._scheduler.add_request(request)
            except EngineError as failure:
                outputs += self._output_processor.end(request, "error", str(failure), failure.code)
        return outputs
