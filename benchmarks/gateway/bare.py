"""The bare engine on the same requests: what a share of its tokens per second is taken of."""

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
"""Share of the bare engine's tokens per second that streams through the gateway are to have."""
ENGINE = Contender("bare", "benchmarks.engines.pagemill", "the engine alone, offline")


@dataclass(frozen=True, slots=True)
class Alone:
    """One pass of the bare engine over the requests."""

    tokens_per_s: float
    cpu_ms: float
    """Processor time per request."""


class BareEngine:
    """An engine's process, stopped while others are measured; as many rows as there are requests at once."""

    def __init__(self, process: EngineProcess, workload: Workload) -> None:
        self._process = process
        self._workload = workload

    def measure(self) -> Alone:
        """Run all requests. Blocks."""
        before = self._process.processor_seconds()
        timing = self._process.measure(self._workload)
        cpu = self._process.processor_seconds() - before
        return Alone(timing.tokens_per_second, 1000 * cpu / len(self._workload.prompts))


@contextmanager
def bare_engine(
    model: str,
    prompts: Sequence[list[int]],
    max_tokens: int,
    rows: int,
    directory: Path,
    engine: Contender = ENGINE,
) -> Iterator[BareEngine]:
    workload = Workload("streams", list(prompts), [max_tokens] * len(prompts))
    warmup = Workload("warmup", workload.prompts[:rows], workload.max_tokens[:rows])
    request = Request(model, [warmup], workload.longest, KV_BYTES, {"max_num_seqs": rows})
    with EngineProcess(engine, request, directory) as process:
        process.wait_until_ready()
        yield BareEngine(process, workload)
