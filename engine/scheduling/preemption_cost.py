"""The cost of a preemption: copying a sequence's blocks to the host and back, or recomputing its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceType

from pagemill.engine.plan import StepPlan
from pagemill.engine.scheduling.kv.swap_space import SwapQuote
from pagemill.engine.scheduling.request import Sequence

_WEIGHT = 0.1
"""The weight of the newest measurement in the moving averages."""


class PreemptionCost:
    """Compares bytes over the link's bandwidth with tokens times the measured seconds per token.

    Blocks that others hold count on neither side: they stay, and are found again. A beam search that is not
    swapped restarts from its prompt, so its steps count as well.
    """

    def __init__(self, block_bytes: int, bytes_per_second: float) -> None:
        self._swap_seconds_per_block = 2 * block_bytes / bytes_per_second  # out, and in again
        self._seconds_per_token = 0.0
        self._seconds_per_decode_step = 0.0
        self._planned: dict[int, float] = {}
        """Step in flight -> the time it was planned."""
        self._last_end = 0.0

    def step_planned(self, plan: StepPlan) -> None:
        self._planned[plan.step_id] = time.perf_counter()

    def step_ended(self, plan: StepPlan, *, is_valid: bool) -> None:
        """Record a retired step. It had the device since its launch, or since the end of the one before."""
        now = time.perf_counter()
        began = max(self._planned.pop(plan.step_id, now), self._last_end)
        self._last_end = now
        if is_valid:
            self.observe(plan, now - began)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the averages with a step's duration."""
        if plan.kind == "decode":
            self._seconds_per_decode_step = _average(self._seconds_per_decode_step, seconds)
        else:
            self._seconds_per_token = _average(self._seconds_per_token, seconds / plan.num_tokens)

    def prefers_swap(self, quote: SwapQuote, victims: SequenceType[Sequence]) -> bool:
        """Return True if swapping costs no more. Before any measurement, recomputing counts as free."""
        is_search = victims[0].request.beam_search is not None
        num_steps = len(victims[0].output_token_ids) if is_search else 0
        recompute_s = quote.num_tokens * self._seconds_per_token + num_steps * self._seconds_per_decode_step
        return quote.num_blocks * self._swap_seconds_per_block <= recompute_s


def _average(average: float, value: float) -> float:
    return value if not average else average + _WEIGHT * (value - average)
