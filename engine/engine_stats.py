"""The engine's step counters. Plain lists and bisection: no lock, nothing per token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pagemill.engine.outputs import Histogram, HistogramSnapshot, KVCacheStats, LabelValues, StepStats
from pagemill.engine.plan import StepPlan, StepResult

STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
POWERS_OF_TWO = tuple(float(2**exponent) for exponent in range(15))
UTILIZATION_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
PHASES = ("schedule", "prepare", "forward", "sample", "output")
KINDS = ("prefill", "decode", "mixed")


class StepRecorder:
    """Counters and histograms over steps."""

    def __init__(self, budget: int) -> None:
        """`budget`: maximum number of tokens that a step may compute."""
        self.stats = StepStats()
        """Read by a snapshot between two steps."""
        self._budget = budget
        self._budget_use = Histogram(UTILIZATION_BUCKETS)
        self._seconds = {(phase, kind): Histogram(STEP_BUCKETS) for phase in PHASES for kind in KINDS}
        self._tokens = {(kind,): Histogram(POWERS_OF_TWO) for kind in KINDS}
        self._utilization = Histogram(UTILIZATION_BUCKETS)
        self._batch_size = Histogram(POWERS_OF_TWO)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the time inside the block as busy."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stats.busy_seconds += time.perf_counter() - started

    def planned(self, plan: StepPlan, kv: KVCacheStats, seconds: float) -> None:
        """Record a launched step and its planning time; `kv` is the pool as this step fills it."""
        kind, num_tokens = plan.kind, plan.num_tokens
        self._seconds["schedule", kind].observe(seconds)
        self._tokens[kind,].observe(num_tokens)
        self._budget_use.observe(num_tokens / self._budget)
        self._batch_size.observe(len(plan.work) - plan.num_drafts)
        self._utilization.observe(kv.utilization)
        self.stats.peak_utilization = max(self.stats.peak_utilization, kv.utilization)

    def collected(self, plan: StepPlan, result: StepResult, output_s: float) -> None:
        """Record a retired step."""
        self.stats.finished += 1
        self.stats.replayed += result.is_replayed
        self.stats.sharing_rows += result.sharing_rows
        self.stats.computed_tokens += plan.num_tokens
        self.stats.last_time = time.monotonic()
        kind = plan.kind
        self._seconds["prepare", kind].observe(result.prepare_s)
        self._seconds["forward", kind].observe(result.forward_s)
        self._seconds["sample", kind].observe(result.sample_s)
        self._seconds["output", kind].observe(output_s)

    def histograms(self) -> dict[str, dict[LabelValues, HistogramSnapshot]]:
        return {
            "step_seconds": {labels: histogram.snapshot() for labels, histogram in self._seconds.items()},
            "step_tokens": {labels: histogram.snapshot() for labels, histogram in self._tokens.items()},
            "step_utilization": {(): self._utilization.snapshot()},
            "step_budget_use": {(): self._budget_use.snapshot()},
            "batch_size": {(): self._batch_size.snapshot()},
        }
