"""The engine: one loop over plan, launch and collect. Owned by one thread from loading on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceType
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pagemill.common.sampling_fields import MAX_SEED
from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.beam_search import BeamSearches
from pagemill.engine.block_watch import BlockWatch
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine_loop import EngineLoop
from pagemill.engine.errors import EngineError, InvalidRequest, UnsupportedFeature
from pagemill.engine.media import MediaItem, PromptMedia
from pagemill.engine.media_queue import MediaQueue
from pagemill.engine.outputs import (
    Capacity,
    EngineStats,
    KVCacheStats,
    MediaStats,
    RequestOutput,
    SampleState,
)
from pagemill.engine.parts import EngineParts
from pagemill.engine.plan import StepHandle, StepPlan, StepResult
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus, SequenceUpdate
from pagemill.engine.scheduling.scheduler import Scheduler
from pagemill.engine.scheduling.scoring import Scores
from pagemill.engine.structured_output.grammars import MASK_WAIT_S, Grammars
from pagemill.engine.tasks import GENERATE, Generate, Score, Task
from pagemill.engine.text.best_of import BestOf
from pagemill.engine.text.input_processor import InputLimits
from pagemill.engine.text.output_processor import OutputProcessor

if TYPE_CHECKING:
    from pagemill.engine.models.directory import LocalModel

_PREPARATION_WAIT_S = 0.01
"""Maximum time for which a step without other work waits for an adapter or a schema."""
T = TypeVar("T")


class Engine(EngineLoop[EngineParts, StepPlan]):
    """Continuous batching over a paged KV cache: requests in, deltas out, one step at a time."""

    def __init__(self, parts: EngineParts, *, seed: int = 0) -> None:
        super().__init__(parts)
        limits = parts.limits
        self._seed = seed
        self._scheduler = Scheduler(limits)
        self._searches = BeamSearches(self._scheduler, limits.eos_token_ids)
        self._output_processor = OutputProcessor(
            parts.tokenizer, self._scheduler.finish_sequence, limits.eos_token_ids
        )
        self._adapted: dict[str, Request] = {}
        """The requests with an adapter; those without a slot are not in the scheduler's queues."""
        self._media = (
            None if parts.encoder is None else MediaQueue(parts.encoder, limits.max_num_batched_tokens // 4)
        )
        self._kv_of_step: KVCacheStats | None = None
        self._unsampled: StepHandle | None = None
        """The newest step, if its plan `samples_later`."""
        self._block_watch = BlockWatch(self._scheduler.kv_cache.pool.states)
        self._grammars = Grammars(parts.tokenizer, self.token_texts, parts.vocab_size, limits.eos_token_ids)
        pool_tokens = (limits.num_kv_blocks - 1) // len(limits.kv_windows) * limits.block_size
        self.input_processor = parts.inputs(
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
            images=parts.images or parts.media_refusal,
            defaults=parts.defaults,
        )

    @classmethod
    def from_config(cls, config: EngineConfig, model: LocalModel | None = None) -> Engine:
        """Load the model, optionally from known files. Raises `ConfigError`, mostly `ModelLoadError`."""
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
        media: SequenceType[MediaItem] = (),
    ) -> None:
        """Add a request that `input_processor.process` has prepared.

        Args:
            priority: lower runs first.
            arrival: orders requests of equal priority; any clock, used consistently. None: now.
            resume: one state per sample, to continue from as if never interrupted. best_of and beam search have no
                intermediate state to continue from.
            cache_salt: only requests with the same salt share prefix cache blocks, so that timing does not reveal
                the prompts of others.
            task: the request's purpose; `params` of a `Score` set the number of alternatives per position.
            adapter: one that `adapters.find` returned.
            media: the pictures behind the prompt's placeholder tokens, in their order.

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
            raise InvalidRequest("best_of and beam search start from the prompt and cannot resume")
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
            media=self._placed(prompt_token_ids, media),
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self._add_sequences(request, resume)
        self._searches.add(request)  # before the scheduler classifies it
        try:
            self._begin(request, adapter)
        except Exception:
            self._searches.discard(request)
            raise
        self._output_processor.add(request, best_of)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request; its blocks are released within a step. An unknown id is ignored: it has already ended."""
        self._kv_of_step = None
        waiting = self._grammars.withdraw(request_id)
        if self._media is not None:
            waiting = self._media.withdraw(request_id) or waiting
        if (
            self._adapted
            and (request := self._release_adapter(request_id)) is not None
            and request.adapter_slot < 0
        ):
            waiting = request
        if waiting is not None:
            self._searches.discard(waiting)
            return self._output_processor.end(waiting, "abort")
        return self._report(self._scheduler.abort(request_id))

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        if self._adapted or self._media is not None:
            for output in outputs:
                if output.finished:
                    self._release_adapter(output.request_id)
                    if self._media is not None:
                        self._media.withdraw(output.request_id)
        return outputs

    def _take_prepared(self) -> list[RequestOutput]:
        """Collect loaded adapters, compiled schemas, and masks for the next tokens."""
        outputs: list[RequestOutput] = []
        if self._media is not None:
            encoded = self._media.encode(self._scheduler.has_cached_media)
            outputs += self._admit_ready(encoded, self._begin_encoded)
        if self._adapted:
            ready = self._parts.adapters.ready(self._preparation_wait_s())
            outputs += self._admit_ready(
                ((self._adapted[name], slot) for name, slot in ready), self._take_slot
            )
        if self._grammars:
            ready_schemas = self._grammars.compiled(self._preparation_wait_s())
            outputs += self._admit_ready(
                ready_schemas, lambda request, _: self._scheduler.add_request(request)
            )
        return outputs + self._read_on()

    def _plan(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        self._kv_of_step = None
        if plan is None and not self._in_flight and self._scheduler.has_unread:
            self._grammars.pump(MASK_WAIT_S)
        return plan

    def _observe_cache(self) -> KVCacheStats:
        self._kv_of_step = self._scheduler.kv_cache.stats()
        self._block_watch.observe()
        return self._kv_of_step

    def _start(self, plan: StepPlan) -> Callable[[], StepResult]:
        step = self._parts.executor.launch(plan)
        if plan.samples_later:
            self._unsampled = step
        return step.wait

    def _sample_later(self) -> list[RequestOutput]:
        step, self._unsampled = self._unsampled, None
        if step is None:
            return []
        outputs = self._read_on()
        try:
            if self._scheduler.constrain(step.plan):
                step.sample()
            else:
                self._in_flight[-1] = step.plan, partial(StepResult, step.plan.step_id, [])
        except Exception as error:
            self._in_flight.pop()
            outputs += self._recover(step.plan, error)
        return outputs

    def _read_on(self) -> list[RequestOutput]:
        """Continue sequences that are held for their grammars; wait for fast ones."""
        if not self._scheduler.has_unread:
            return []
        self._grammars.wait_for_masks()
        return self._report(self._scheduler.read_on())

    def _retire(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        updates = self._scheduler.update(plan, result)
        if self._scheduler.has_unread:
            self._grammars.pump(0.0)  # their masks are computed while the texts are
        return self._report(updates)

    def has_unfinished(self) -> bool:
        """True if `step()` has work left, including steps in flight."""
        is_held = (
            bool(self._grammars)
            or bool(self._media)
            or any(request.adapter_slot < 0 for request in self._adapted.values())
        )
        return bool(self._in_flight) or self._scheduler.has_unfinished() or is_held

    def capacity(self) -> Capacity:
        return self._scheduler.capacity()

    def stats(self) -> EngineStats:
        """Return a snapshot; call it between two steps, on the engine's thread.

        While there is work, the snapshot has the pool as the latest step filled it: between two steps the blocks
        of sequences that just ended are already free, and a pool that is full in every step would look empty.
        """
        texts = self._output_processor.stats
        if not self.has_unfinished():
            self._block_watch.observe()
        snapshot = self._snapshot(texts, self._scheduler.stats())
        return replace(
            snapshot,
            kv=self._kv(),
            grammars=self._grammars.stats(),
            media=MediaStats() if self._media is None else self._media.stats(),
            blocks=self._block_watch.latest,
            histograms=snapshot.histograms
            | self._scheduler.kv_cache.pool.residency.histograms()
            | self._grammars.histograms(),
        )

    def close(self) -> None:
        super().close()
        self._grammars.close()
        self._parts.executor.close()

    def load_grammar_vocabulary(self) -> None:
        self._grammars.load_vocabulary()

    def watch_blocks(self, seconds: float) -> None:
        self._block_watch.watch_for(seconds)

    def check_integrity(self) -> None:
        """Recompute every invariant of the bookkeeping; for tests."""
        self._scheduler.check_integrity()

    def _kv(self) -> KVCacheStats:
        kv = self._kv_of_step if self._kv_of_step is not None and self.has_unfinished() else None
        parts = self._parts
        kv = replace(
            kv or self._scheduler.kv_cache.stats(), block_bytes=parts.kv_block_bytes, dtype=parts.kv_dtype
        )
        if not (state_bytes := parts.limits.state_bytes):
            return kv
        active = self._scheduler.num_running
        slots = parts.limits.max_num_seqs + parts.limits.num_cached_states
        return replace(kv, state_bytes=state_bytes, state_slots=slots, active_state_slots=active)

    def _is_device_alive(self) -> bool:
        return self._parts.executor.is_device_alive()

    def _request_ids(self, plan: StepPlan) -> list[str]:
        return self._scheduler.request_ids(plan)

    def _run_again(self, plan: StepPlan, message: str) -> list[RequestOutput]:
        request_ids = self._request_ids(plan)
        self._scheduler.recover(plan)
        if len(request_ids) != 1 or self._scheduler.num_step_failures(request_ids[0]) < 2:
            return []
        return self._report(self._scheduler.fail(request_ids[0], message, "engine_error"))

    def _report(self, updates: list[SequenceUpdate]) -> list[RequestOutput]:
        return self._output_processor.process(self._searches.drive(updates))

    def _resolve_seed(self, params: SamplingParams) -> int:
        self._num_added += 1
        if params.seed is not None:
            return params.seed
        # Spread by an odd multiplier, so that neighboring engine seeds and counters do not collide.
        return (self._seed * 0x9E3779B97F4A7C15 + self._num_added) & MAX_SEED

    def _check_task(self, task: Task, params: SamplingParams) -> None:
        """Raise InvalidRequest for a task that the parameters do not support."""
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

    def _placed(self, token_ids: SequenceType[int], media: SequenceType[MediaItem]) -> PromptMedia | None:
        """Return a prompt's media with their positions; None if it has no media. Raises InvalidRequest."""
        if not media:
            return None
        if self._parts.encoder is None:
            raise UnsupportedFeature(self._parts.media_refusal)
        return self._parts.encoder.place(token_ids, media)

    def _add_sequences(self, request: Request, resume: SequenceType[SampleState] | None) -> None:
        """Give a request its sequences."""
        for index in range(request.params.num_sequences):
            sequence = Sequence(request, index)
            if isinstance(request.task, Score):
                sequence.scoring = Scores(sequence, request.task.continuations[index])
            if resume is not None:
                self._resume(sequence, resume[index])
            request.sequences.append(sequence)

    @staticmethod
    def _resume(sequence: Sequence, state: SampleState) -> None:
        if not sequence.continuation:
            sequence.output_token_ids = list(state.token_ids)
        if state.finish_reason is not None:
            sequence.finish_reason = state.finish_reason
            sequence.status = SequenceStatus.FINISHED

    def _begin(self, request: Request, adapter: Adapter | None) -> None:
        """Forward a request, or hold it while its adapter is read. Raises `EngineError`."""
        name = request.request_id
        if (
            name in self._grammars
            or name in self._adapted
            or (self._media is not None and name in self._media)
        ):
            raise InvalidRequest(f"request {name!r} is already running")
        if request.media is not None and self._media is not None:
            self._scheduler.check(request)  # before its media are encoded
            self._media.add(request, adapter)
        else:
            self._begin_encoded(request, adapter)

    def _begin_encoded(self, request: Request, adapter: Adapter | None) -> None:
        """Forward a request whose media, if any, are encoded. Raises `EngineError`."""
        if adapter is None:
            self._enqueue(request)
        else:
            slot = self._parts.adapters.attach(request.request_id, adapter)
            self._adapted[request.request_id] = request
            self._take_slot(request, slot)

    def _enqueue(self, request: Request) -> None:
        """Pass a request to the scheduler once its grammars are ready. Raises `EngineError`."""
        request.stay.enter("grammar")
        if self._grammars.attach(request):
            self._scheduler.add_request(request)

    def _take_slot(self, request: Request, slot: int | None) -> None:
        if slot is None:
            return
        request.adapter_slot = slot
        try:
            self._enqueue(request)
        except EngineError:
            self._release_adapter(request.request_id)
            raise

    def _release_adapter(self, request_id: str) -> Request | None:
        """Release the adapter of a request, if it has one."""
        self._parts.adapters.release(request_id)
        return self._adapted.pop(request_id, None)

    def _preparation_wait_s(self) -> float:
        """Return the time to wait for the first adapter or schema: 0 while there is other work."""
        return 0.0 if self._in_flight or self._scheduler.has_unfinished() else _PREPARATION_WAIT_S

    def _admit_ready(
        self, ready: Iterable[tuple[Request, T | EngineError]], admit: Callable[[Request, T], None]
    ) -> list[RequestOutput]:
        """Admit requests whose adapter or schema is ready; return the final outputs of those for which it failed."""
        outputs = []
        for request, outcome in ready:
            try:
                if isinstance(outcome, EngineError):
                    raise outcome
                admit(request, outcome)
            except EngineError as failure:
                self._searches.discard(request)
                outputs += self._output_processor.end(request, "error", str(failure), failure.code)
        return outputs
