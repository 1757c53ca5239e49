"""What happens inside an engine's own process: run the workloads it is handed, time them, write the result.

Standard library only: a peer's environment imports this file too, and has nothing of ours installed.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, max_tokens) -> output token ids, in the order of the prompts."""


@dataclass(slots=True)
class Request:
    """One engine process's orders. Warm-up runs first, untimed, and shares no tokens with what is timed."""

    model: str
    workloads: list[Workload]
    warmup: list[Workload]
    kv_cache_memory_bytes: int
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options given on the command line; only Pagemill's engine takes any."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Request:
        data = json.loads(path.read_text())
        for name in ("workloads", "warmup"):
            data[name] = [Workload.from_json(item) for item in data[name]]
        return cls(**data)


@dataclass(slots=True)
class Timing:
    """One timed pass over a workload."""

    workload: str
    seconds: float
    output_tokens: int
    outputs: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def run(load: Callable[[Request], tuple[Generate, dict[str, str]]]) -> None:
    """The body of an engine process: `python -m benchmarks.<engine> REQUEST RESULT`.

    `load` makes the engine ready and names the versions it is made of. An engine that returns fewer or more
    tokens than it was asked for has done other work than its rivals: that is an error, not a result.
    """
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = Request.read(request_path)
    started = time.perf_counter()
    generate, versions = load(request)
    load_seconds = time.perf_counter() - started
    for workload in request.warmup:
        generate(workload.prompts, workload.max_tokens)
    timings = [_time(generate, workload) for workload in request.workloads]
    result = {
        "versions": versions,
        "load_seconds": load_seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "timings": [asdict(timing) for timing in timings],
    }
    # Renamed into place: a process that dies here leaves no half-written result.
    partial = result_path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(result_path)


def _time(generate: Generate, workload: Workload) -> Timing:
    started = time.perf_counter()
    outputs = generate(workload.prompts, workload.max_tokens)
    seconds = time.perf_counter() - started
    lengths = [len(output) for output in outputs]
    if lengths != workload.max_tokens:
        wrong = next(
            i for i, pair in enumerate(zip(lengths, workload.max_tokens, strict=True)) if pair[0] != pair[1]
        )
        raise RuntimeError(
            f"{workload.name}: request {wrong} is {lengths[wrong]} tokens long, not {workload.max_tokens[wrong]}"
        )
    return Timing(workload.name, seconds, sum(lengths), outputs)
