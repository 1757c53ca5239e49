"""The bare engine on the same requests: the reference for fractions of its tokens per second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.contenders import Contender
from benchmarks.engines.process import EngineProcess
from benchmarks.gateway.processes import KV_BYTES
from benchmarks.measure import Request
from benchmarks.workloads import Workload

GOAL = 0.85
"""Target share of the bare engine's tokens per second for streams through the gateway."""
ENGINE = Contender("bare", "benchmarks.engines.pagemill", "the engine alone, offline")


@dataclass(frozen=True, slots=True)
class Alone:
    """One pass of the bare engine over the requests."""

    tokens_per_s: float
    cpu_ms: float
    """CPU time per request."""


class BareEngine:
    """An engine's process, stopped while others are measured."""

    def __init__(self, process: EngineProcess, max_tokens: int) -> None:
        self._process = process
        self._max_tokens = max_tokens

    def measure(self, prompts: Sequence[list[int]]) -> Alone:
        """Run all requests. Blocks."""
        before = self._process.processor_seconds()
        timing = self._process.measure(_workload(prompts, self._max_tokens))
        cpu = self._process.processor_seconds() - before
        return Alone(timing.tokens_per_second, 1000 * cpu / len(prompts))


@contextmanager
def bare_engine(
    model: str, warmup: Sequence[list[int]], max_tokens: int, directory: Path, engine: Contender = ENGINE
) -> Iterator[BareEngine]:
    """An engine with one row per prompt of `warmup`."""
    workload = _workload(warmup, max_tokens)
    request = Request(model, [workload], workload.longest, KV_BYTES, {"max_num_seqs": len(warmup)})
    with EngineProcess(engine, request, directory) as process:
        process.wait_until_ready()
        yield BareEngine(process, max_tokens)


def _workload(prompts: Sequence[list[int]], max_tokens: int) -> Workload:
    return Workload("streams", list(prompts), [max_tokens] * len(prompts))
