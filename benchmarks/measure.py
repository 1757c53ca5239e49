"""The code inside an engine's process: load the engine, then run one pass over a workload per request.

Standard library only: a peer's environment also imports this file, without Pagemill installed.
"""

from __future__ import annotations

import json
import os
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
    """The workloads to prepare for. The warm-up is not timed, and does not share tokens with the timed passes."""

    model: str
    warmup: list[Workload]
    longest: int
    """Number of tokens of the longest request, prompt and output."""
    kv_cache_memory_bytes: int
    options: dict[str, Any] = field(default_factory=dict)
    """A contender's settings in addition to workloads: options of Pagemill's engine, a batch size."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Request:
        data = json.loads(path.read_text())
        data["warmup"] = [Workload.from_json(item) for item in data["warmup"]]
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine's first message."""

    versions: dict[str, str]
    load_seconds: float


@dataclass(frozen=True, slots=True)
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
    """Run an engine process: `python -m benchmarks.<engine> REQUEST DESCRIPTOR`.

    `load` loads the engine and returns its component versions. Requests arrive on stdin, one workload per
    line. Responses go to the file descriptor, one per line, because the engine may print to stdout. The
    process exits at the end of stdin.
    """
    request = Request.read(Path(sys.argv[1]))
    descriptor = int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w") as answers:
        started = time.perf_counter()
        generate, versions = load(request)
        ready = Ready(versions, time.perf_counter() - started)
        for workload in request.warmup:
            generate(workload.prompts, workload.max_tokens)
        _answer(answers, ready)
        for line in sys.stdin:
            _answer(answers, time_pass(generate, Workload.from_json(json.loads(line))))


def time_pass(generate: Generate, workload: Workload) -> Timing:
    """Run one pass.

    Raises:
        RuntimeError: the engine returned fewer or more tokens than requested, so its work is not comparable with
            that of its rivals; that is an error, not a result.
    """
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


def _answer(answers: Any, message: Ready | Timing) -> None:
    answers.write(json.dumps(asdict(message)) + "\n")
    answers.flush()
