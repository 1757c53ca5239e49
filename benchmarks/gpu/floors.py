"""Lower bounds of `benchmarks.gpu`: a cost model of the device at its measured rates.

Every operator takes the larger of two times: the minimum bytes it must move at the bandwidth of a large copy,
and its floating-point operations at the rate of a large matmul, both measured in the same run (the roofline
model of Williams, Waterman and Patterson, 2009). The operators of a layer depend on each other, so a step
takes their sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.models import ModelShape


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The reference rates; NaN: not measured."""

    bytes_per_s: float
    """Bandwidth of a copy: bytes read plus bytes written."""
    flops: float
    """Rate of a large matmul in bf16."""
    fp8_flops: float


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step of the engine."""

    rows: Sequence[tuple[int, int]]
    """(tokens computed, keys attended to) of each row."""
    shared_keys: int = 0
    """Number of leading keys in every row that are the same blocks: at best, they are read once."""

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.rows)

    @property
    def is_decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.rows)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Lower bounds on the seconds of operators and steps."""

    ceilings: Ceilings

    def seconds(self, num_bytes: float, operations: float = 0.0) -> float:
        return max(num_bytes / self.ceilings.bytes_per_s, operations / self.ceilings.flops)

    def step(self, model: ModelShape, step: Step, *, fp8: bool = False) -> float:
        """One step of the engine, weights and cache in bf16; with fp8 the layers' matmuls have fp8 weights."""
        rate = self.ceilings.fp8_flops if fp8 else self.ceilings.flops
        weights = model.layer_weights * (1 if fp8 else 2)
        product = max(weights / self.ceilings.bytes_per_s, 2 * step.num_tokens * model.layer_weights / rate)
        head = self.seconds(2 * model.head_weights, 2 * len(step.rows) * model.head_weights)
        return model.num_layers * (product + self._attention(model, step)) + head

    def _attention(self, model: ModelShape, step: Step) -> float:
        decoded = [kv_len for query_len, kv_len in step.rows if query_len == 1]
        prefilled = [row for row in step.rows if row[0] > 1]
        heads, width = model.num_heads * model.head_dim, 4 * model.num_kv_heads * model.head_dim
        seconds = 0.0
        if decoded:
            keys = sum(decoded) - step.shared_keys * (len(decoded) - 1)
            seconds += self.seconds(keys * width, 4 * sum(decoded) * heads)
        if prefilled:
            keys = sum(kv_len for _, kv_len in prefilled) - step.shared_keys * (len(prefilled) - 1)
            seconds += self.seconds(keys * width, 4 * visible_keys(prefilled) * heads)
        return seconds

    def workload(self, model: ModelShape, steps: Sequence[Step], *, fp8: bool = False) -> float:
        return sum(self.step(model, step, fp8=fp8) for step in steps)


def visible_keys(rows: Sequence[tuple[int, int]]) -> int:
    """Number of (query, key) pairs that a causal mask allows."""
    return sum(
        query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2 for query_len, seq_len in rows
    )


@dataclass(slots=True)
class _Running:
    computed: int
    prompt: int
    wanted: int
    """Tokens computed at the end of the request: the last output is never fed back."""


def schedule(
    requests: Sequence[tuple[int, int]], *, most_rows: int, token_budget: int, cached: int = 0
) -> Iterator[Step]:
    """The steps of a continuous-batching engine that receives all requests at the start.

    Args:
        requests: (prompt length, output length) of each, in order.
        cached: number of leading tokens of all prompts that are already in the cache.
    """
    waiting = deque(
        _Running(min(cached, prompt - 1), prompt, prompt + output - 1) for prompt, output in requests
    )
    running: list[_Running] = []
    while waiting or running:
        rows: list[tuple[int, int]] = []
        budget = token_budget
        while waiting and len(running) < most_rows:
            running.append(waiting.popleft())
        for row in running:  # decoding rows started first, so they are first
            count = min(budget, max(1, row.prompt - row.computed))
            if count:
                row.computed += count
                budget -= count
                rows.append((count, row.computed))
        running = [row for row in running if row.computed < row.wanted]
        yield Step(rows, cached)
