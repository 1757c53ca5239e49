"""The loop of an engine: plan a step, launch it, collect the oldest one, recover from errors."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Generic, TypeVar

from pagemill.engine.adapters.pool import AdapterPool, NoAdapters
from pagemill.engine.device_failure import is_lost_device_error
from pagemill.engine.engine_stats import StepRecorder
from pagemill.engine.errors import DeviceLost
from pagemill.engine.outputs import (
    EngineStats,
    KVCacheStats,
    LoadedModel,
    RequestOutput,
    SchedulerStats,
)
from pagemill.engine.parts import ModelParts
from pagemill.engine.plan import StepPlan, StepResult
from pagemill.engine.text.output_processor import OutputStats
from pagemill.engine.text.token_texts import TokenTexts

logger = logging.getLogger(__name__)

Parts = TypeVar("Parts", bound=ModelParts)
Plan = TypeVar("Plan", bound=StepPlan)


class EngineLoop(ABC, Generic[Parts, Plan]):
    """Requests in, outputs out, one step at a time. Owned by one thread from loading on."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.served_models = parts.served_models
        """The names that jobs may use, the main one first."""
        self.lacks = frozenset[str]()
        """The abilities that it lacks."""
        self.fingerprint = parts.fingerprint
        """Identifies the model that computed a checkpoint: weights, dtype, quantization and device class."""
        self.model_parts = parts.model_parts
        """The description of how each part of the model runs, as logged at startup."""
        self.tier = parts.tier
        self.tokenizer = parts.tokenizer
        self.token_texts = TokenTexts(parts.tokenizer)
        """The texts of single tokens. Safe on any thread."""
        self.limits = limits = parts.limits
        self._num_added = 0
        self._in_flight: deque[tuple[Plan, Callable[[], StepResult]]] = deque()
        self._lost: DeviceLost | None = None
        self._recorder = StepRecorder(limits.max_num_batched_tokens)
        self._loaded = LoadedModel(
            self.served_models[0],
            parts.device,
            self.tier,
            self.fingerprint,
            limits.max_model_len,
            limits.max_num_seqs,
            parts.replaced_kernels,
            parts.has_lost_graphs,
        )

    @property
    def adapters(self) -> AdapterPool | NoAdapters:
        """The adapters that requests can name. Its names are safe to read on any thread."""
        return self._parts.adapters

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, collect the oldest one in flight, and return its outputs.

        Raises:
            DeviceLost: the device failed, or a process of a model spread over several crashed. Every further step
                raises it too.
        """
        if self._lost is not None:
            raise self._lost
        outputs = self._take_prepared()
        with self._recorder.stepping():
            started = time.perf_counter()
            plan = self._plan()
            if plan is not None:
                outputs += self._launch(plan, time.perf_counter() - started)
            if self._in_flight and (plan is None or len(self._in_flight) > self.limits.depth):
                outputs += self._collect(*self._in_flight.popleft())
            outputs += self._sample_later()
        return outputs

    def failure(self) -> str | None:
        """The crashed process of a model spread over several; None if all are alive. Safe on any thread."""
        return self._parts.ranks.failure() if self._parts.ranks is not None else None

    def close(self) -> None:
        """Free the device's memory, and stop the processes of ranks and of schemas. Do not call `step` afterwards."""
        if self._parts.ranks is not None:
            self._parts.ranks.close()
        self._in_flight.clear()
        self._parts = replace(self._parts, adapters=NoAdapters("the engine is closed"))
        self._lost = self._lost or DeviceLost("the engine is closed")

    def load_grammar_vocabulary(self) -> None:
        """Start preparing for regex, JSON and grammar outputs now instead of at the first such request."""

    def watch_blocks(self, seconds: float) -> None:
        """Keep `stats().blocks` fresh for the next `seconds`, for a viewer of the pool."""

    def _take_prepared(self) -> list[RequestOutput]:
        """Collect the results of background work."""
        return []

    @abstractmethod
    def _plan(self) -> Plan | None:
        """Plan the next step. Return None if nothing can run before a step in flight retires or a request arrives."""

    @abstractmethod
    def _start(self, plan: Plan) -> Callable[[], StepResult]:
        """Start a step, in the background if the device supports it; return a handle that waits for its result."""

    def _sample_later(self) -> list[RequestOutput]:
        """Sample the newest step if its plan `samples_later`: the step before it has been collected."""
        return []

    @abstractmethod
    def _retire(self, plan: Plan, result: StepResult) -> list[RequestOutput]:
        """Return the outputs of a completed step."""

    def _observe_cache(self) -> KVCacheStats:
        """Return the pool as the step that was just planned fills it."""
        return KVCacheStats()

    def _launch(self, plan: Plan, planning_s: float) -> list[RequestOutput]:
        cache = self._observe_cache()
        try:
            self._in_flight.append((plan, self._start(plan)))
        except Exception as error:
            return self._recover(plan, error)
        self._recorder.planned(plan, cache, planning_s)
        return []

    def _collect(self, plan: Plan, wait: Callable[[], StepResult]) -> list[RequestOutput]:
        """Wait for a step and retire it."""
        try:
            result = wait()
        except Exception as error:
            return self._recover(plan, error)
        waited = time.perf_counter()
        outputs = self._retire(plan, result)
        self._recorder.collected(plan, result, time.perf_counter() - waited)
        return outputs

    @abstractmethod
    def _is_device_alive(self) -> bool:
        """Return True if the device still works; called after a step raised."""

    @abstractmethod
    def _request_ids(self, plan: Plan) -> list[str]:
        """Return the requests to blame if this step raises."""

    @abstractmethod
    def _run_again(self, plan: Plan, message: str) -> list[RequestOutput]:
        """Run the requests of a step that raised again; fail one, with `message`, that raised alone twice."""

    def _recover(self, plan: Plan, error: Exception) -> list[RequestOutput]:
        """Recover from a step that raised. Raises `DeviceLost` if the device cannot run further steps."""
        lost = error if isinstance(error, DeviceLost) else None
        if lost is None and (is_lost_device_error(error) or not self._is_device_alive()):
            logger.error("a step raised, and the device runs nothing any more", exc_info=error)
            reason = (str(error).splitlines() or [""])[0]
            lost = DeviceLost(f"the device is lost: {type(error).__name__}: {reason}")
            lost.__cause__ = error
        if lost is not None:
            # A device reports errors late: any step not yet collected may have caused this one.
            plans = [plan, *(each for each, _ in self._in_flight)]
            lost.request_ids = frozenset(name for each in plans for name in self._request_ids(each))
            self._lost = lost
            raise lost
        num_requests = len(self._request_ids(plan))
        logger.exception(
            "step %d raised; its %d requests run again", plan.step_id, num_requests, exc_info=error
        )
        return self._run_again(plan, f"the step raised {type(error).__name__} with this request alone in it")

    def _snapshot(self, texts: OutputStats, scheduler: SchedulerStats) -> EngineStats:
        return EngineStats(
            scheduler=scheduler,
            loaded=self._loaded,
            steps=replace(self._recorder.stats),
            requests=deepcopy(texts.requests),
            adapters=self._parts.adapters.stats(),
            memory_bytes=self._parts.memory_bytes(),
            histograms=self._recorder.histograms() | texts.histograms(),
        )
