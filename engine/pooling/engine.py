"""The engine of models for vectors or scores: computes result rows of texts in packed batches.

There is no KV cache, no sampling and no state to resume, so a batch contains all waiting texts that fit in its token
budget. A request's texts may be spread over several batches.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.engine_loop import EngineLoop
from pagemill.engine.errors import InvalidRequest, UnsupportedFeature
from pagemill.engine.media import MediaItem
from pagemill.engine.outputs import (
    Capacity,
    CompletionDelta,
    EngineStats,
    FinishReason,
    PooledRows,
    RequestOutput,
    SampleState,
    SchedulerStats,
    Usage,
)
from pagemill.engine.parts import ModelParts
from pagemill.engine.plan import RowWork, StepPlan, StepResult
from pagemill.engine.pooling.input_processor import PoolingInputProcessor
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import GENERATE, Pool, Task
from pagemill.engine.text.output_processor import OutputStats

if TYPE_CHECKING:
    import torch

    from pagemill.engine.devices.backend import HostCopy
    from pagemill.engine.pooling.loader import PackedBatch, PoolingModel

WAITING_STEPS = 8
"""A worker can fetch tokens for this many batches, so that each batch is full."""
_Key = tuple[int, float, int, int]
"""Lower runs first: priority, arrival, index of the request, index of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParts(ModelParts):
    """A loaded model and its serving information.

    An interrupted job starts again, so its tier depends on whether results depend on the batch.
    """

    model: PoolingModel
    input_processor: PoolingInputProcessor


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    token_ids: list[int]
    task: Pool
    key: tuple[int, float, int]
    added: float
    rows: list[torch.Tensor | None] = field(default_factory=list)
    tokens_done: int = 0
    num_left: int = 0
    has_begun: bool = False
    has_failed: bool = False
    """True if a step with it raised: it runs alone."""


@dataclass(frozen=True, slots=True)
class _Text:
    request: _Request
    index: int
    begin: int

    @property
    def length(self) -> int:
        return self.request.task.lengths[self.index]

    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.begin : self.begin + self.length]


@dataclass(slots=True, kw_only=True)
class _Batch(StepPlan):
    texts: list[_Text]
    packed: PackedBatch
    rows: torch.Tensor = field(init=False)
    """One per text, once they have been computed."""


class PoolingEngine(EngineLoop[PoolingParts, _Batch]):
    """Packed batches over texts."""

    def __init__(self, parts: PoolingParts) -> None:
        super().__init__(parts)
        self._model = parts.model
        self._requests: dict[str, _Request] = {}
        self._waiting: list[tuple[_Key, _Text]] = []
        """A heap. Texts of requests that have ended stay in it until their turn."""
        self._stats = OutputStats()
        self._num_steps = self._num_failed_steps = self._num_invalid = 0
        self.input_processor = parts.input_processor

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival: float | None = None,
        resume: Sequence[SampleState] | None = None,
        cache_salt: str = "",
        task: Task = GENERATE,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> None:
        """Add a request that `input_processor.process_pool` has prepared.

        Raises:
            InvalidRequest: it can't run here. Nothing else is affected.
        """
        if not isinstance(task, Pool) or sum(task.lengths) != len(prompt_token_ids) or 0 in task.lengths:
            raise InvalidRequest("the request is not what input_processor.process_pool returns")
        if media:
            raise UnsupportedFeature(self._parts.media_refusal)
        if request_id in self._requests:
            raise InvalidRequest(f"request {request_id!r} is already running")
        key = (priority, time.time() if arrival is None else arrival, self._num_added)
        self._num_added += 1
        request = _Request(request_id, list(prompt_token_ids), task, key, time.monotonic())
        request.rows, request.num_left = [None] * len(task.lengths), len(task.lengths)
        self._requests[request_id] = request
        self._enqueue(request)
        self._stats.requests.prompt_tokens += len(prompt_token_ids)
        self._stats.prompt_length.observe(len(prompt_token_ids))
        self._stats.samples.observe(len(task.lengths))

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now. An unknown id is ignored: it has already ended."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._end(request, "abort")]

    def _plan(self) -> _Batch | None:
        texts = self._next_texts()
        if not texts:
            return None
        work = [RowWork(n, 0, text.length) for n, text in enumerate(texts)]
        self._num_steps += 1
        return _Batch(self._num_steps - 1, work=work, texts=texts, packed=_packed(texts))

    def _start(self, plan: _Batch) -> Callable[[], StepResult]:
        started = time.perf_counter()
        rows = self._model.launch(plan.packed, plan.texts[0].request.task.num_skipped)
        return partial(self._wait, plan, rows, time.perf_counter() - started)

    @staticmethod
    def _wait(plan: _Batch, rows: HostCopy, launching_s: float) -> StepResult:
        started = time.perf_counter()
        (plan.rows,) = rows.wait()
        return StepResult(plan.step_id, [], forward_s=launching_s + time.perf_counter() - started)

    def has_unfinished(self) -> bool:
        """True if `step()` has work left, including steps in flight."""
        return bool(self._in_flight or self._requests)

    def capacity(self) -> Capacity:
        limits = self._parts.limits
        return Capacity(
            free_rows=max(0, limits.max_num_seqs - len(self._requests)),
            available_blocks=limits.num_kv_blocks,
            block_size=1,
            waiting=len(self._requests),
        )

    def stats(self) -> EngineStats:
        """Return a snapshot; call it between two steps, on the engine's thread."""
        running = sum(request.has_begun for request in self._requests.values())
        scheduler = SchedulerStats(
            running=running,
            waiting=len(self._requests) - running,
            steps_failed=self._num_failed_steps,
            invalid_logits=self._num_invalid,
        )
        return self._snapshot(self._stats, scheduler)

    def _enqueue(self, request: _Request) -> None:
        begin = 0
        for index, length in enumerate(request.task.lengths):
            if request.rows[index] is None:
                heapq.heappush(self._waiting, ((*request.key, index), _Text(request, index, begin)))
            begin += length

    def _next_texts(self) -> list[_Text]:
        """Remove and return the next texts within the budget, at least one, with equal lengths adjacent."""
        budget = self._parts.limits.max_num_batched_tokens
        texts: list[_Text] = []
        while self._waiting:
            text = self._waiting[0][1]
            request = text.request
            if not self._is_current(request):
                heapq.heappop(self._waiting)
                continue
            if texts and not self._may_join(text, texts[0].request, budget):
                break
            heapq.heappop(self._waiting)
            texts.append(text)
            budget -= text.length
            if not request.has_begun:
                request.has_begun = True
                self._stats.wait.observe(time.monotonic() - request.added)
        return sorted(texts, key=lambda text: text.length)

    @staticmethod
    def _may_join(text: _Text, first: _Request, budget: int) -> bool:
        request = text.request
        is_alone = (request.has_failed or first.has_failed) and request is not first
        return text.length <= budget and not is_alone and request.task.num_skipped == first.task.num_skipped

    def _retire(self, plan: _Batch, result: StepResult) -> list[RequestOutput]:
        is_sound = plan.rows.isfinite().all(dim=1).tolist()
        changed: dict[str, _Request] = {}
        failed: list[_Request] = []
        for text, row, sound in zip(plan.texts, plan.rows, is_sound, strict=True):
            request = text.request
            if not self._is_current(request):
                continue
            request.rows[text.index] = row
            request.num_left -= 1
            request.tokens_done += text.length
            changed[request.request_id] = request
            if not sound and request not in failed:
                failed.append(request)
        outputs = []
        for request in changed.values():
            if request in failed:
                self._num_invalid += 1
                outputs.append(
                    self._end(request, "error", "the model's numbers were not finite", "output_invalid")
                )
            elif request.num_left:
                outputs.append(_progress(request))
            else:
                outputs.append(self._end(request, "stop"))
        return outputs

    def _end(
        self, request: _Request, reason: FinishReason, error: str | None = None, code: str | None = None
    ) -> RequestOutput:
        del self._requests[request.request_id]
        output = _progress(request)
        output.finished, output.error, output.error_code = True, error, code
        output.usage = Usage(len(request.token_ids), 0, 0)
        delta = CompletionDelta(0, [], "", 0, finish_reason=reason)
        output.deltas = [delta]
        if reason == "stop":
            output.pooled = self._result(request)
            self._stats.requests.pooled_texts[request.task.kind] += len(request.rows)
        self._stats.requests.finished[reason] += 1
        self._stats.requests.prompt_tokens_by_source["computed"] += request.tokens_done
        self._stats.e2e.observe(time.monotonic() - request.added)
        return output

    def _result(self, request: _Request) -> PooledRows:
        import torch

        rows = torch.stack([row for row in request.rows if row is not None])
        task = request.task
        values = self._model.finish(rows, task.kind, task.dimensions)
        return PooledRows(values.shape[1], values.contiguous().numpy().astype("<f4").tobytes())

    def _is_device_alive(self) -> bool:
        return self._model.device.is_alive()

    def _is_current(self, request: _Request) -> bool:
        """Return False for a request that has ended."""
        return self._requests.get(request.request_id) is request

    def _request_ids(self, plan: _Batch) -> list[str]:
        return list({text.request.request_id: None for text in plan.texts})

    def _run_again(self, plan: _Batch, message: str) -> list[RequestOutput]:
        self._num_failed_steps += 1
        first = plan.texts[0].request
        if first.has_failed and self._is_current(first) and len(self._request_ids(plan)) == 1:
            return [self._end(first, "error", message, "engine_error")]
        for text in plan.texts:
            text.request.has_failed = True
            heapq.heappush(self._waiting, ((*text.request.key, text.index), text))
        return []


def _progress(request: _Request) -> RequestOutput:
    return RequestOutput(request.request_id, "prefill", request.tokens_done, len(request.token_ids))


def _packed(texts: Sequence[_Text]) -> PackedBatch:
    from pagemill.engine.pooling.loader import PackedBatch

    lengths = [text.length for text in texts]
    token_ids = np.fromiter((token for text in texts for token in text.token_ids()), np.int64, sum(lengths))
    if not any(text.request.task.second_starts for text in texts):
        return PackedBatch(token_ids, lengths)
    types = np.zeros(len(token_ids), np.int64)
    begin = 0
    for text in texts:
        if starts := text.request.task.second_starts:
            types[begin + starts[text.index] : begin + text.length] = 1
        begin += text.length
    return PackedBatch(token_ids, lengths, types)
