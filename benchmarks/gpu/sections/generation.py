"""Whole requests through the engine, offline: seconds beside the floor of the steps that they need."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args, get_type_hints

from benchmarks.gpu.engines import MOST_ROWS, TOKEN_BUDGET, generate, open_engine, shape_of
from benchmarks.gpu.floors import CostModel, schedule
from benchmarks.gpu.models import LLAMA_8B, QWEN_600M, ModelShape, Requests, uniform_requests
from benchmarks.gpu.section import Bench, Row, Skipped
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError

_TARGET = 0.65
_FP8_GAIN = 1.5


def requests_of(bench: Bench, model: ModelShape, count: int) -> Requests:
    """Return `count` requests of 100 to 1,024 tokens in and out."""
    count, shortest, longest = (3, 3, 6) if bench.is_tiny else (count, 100, 1024)
    return uniform_requests(shape_of(bench, model), count, shortest, longest, seed=count)


def run(bench: Bench) -> Iterator[Row]:
    """All that a step takes, and as few as the slow peer gets."""
    yield from _timed(bench, LLAMA_8B, (256, 64))


def run_qwen(bench: Bench) -> Iterator[Row]:
    """A model whose steps are so short that the host and the launches decide."""
    yield from _timed(bench, QWEN_600M, (256,))


def run_fp8(bench: Bench) -> Iterator[Row]:
    if not knows_fp8():
        raise Skipped('EngineConfig.quantization has no "fp8"')
    try:
        rows = list(_timed(bench, LLAMA_8B, (256,), quantization="fp8"))
    except ConfigError as error:
        raise Skipped(str(error)) from None
    yield from rows
    half = seconds_of(bench, "256 requests")
    if half is not None and rows[0].measured:
        yield Row(case="bf16 / fp8", measured=half / rows[0].measured, unit="x", target=_FP8_GAIN)


def knows_fp8() -> bool:
    annotation = get_type_hints(EngineConfig)["quantization"]
    return any("fp8" in get_args(option) for option in get_args(annotation))


def seconds_of(bench: Bench, case: str) -> float | None:
    """Return what the bf16 engine took for a case earlier in this run."""
    rows = bench.found.get("generation", ())
    return next((row.measured for row in rows if row.case == case), None)


def workload_seconds(cost: CostModel, model: ModelShape, requests: Requests, *, fp8: bool = False) -> float:
    steps = schedule(requests.sizes, most_rows=MOST_ROWS, token_budget=TOKEN_BUDGET)
    return cost.workload(model, list(steps), fp8=fp8)


def _timed(bench: Bench, model: ModelShape, counts: tuple[int, ...], **options: Any) -> Iterator[Row]:
    engine = open_engine(bench, model, **options)
    seconds_by = partial(workload_seconds, model=engine.model, fp8="quantization" in options)
    for count in counts:
        requests = requests_of(bench, model, count)
        seconds = generate(engine.llm, requests)
        yield Row(
            case=f"{count} requests",
            measured=seconds,
            floor=seconds_by(bench.floor, requests=requests),
            prediction=seconds_by(bench.expected, requests=requests),
            target=_TARGET if model is LLAMA_8B and not options else None,
            facts={
                "model": engine.model.name,
                "requests": len(requests),
                "output_tokens": requests.num_output_tokens,
                "tokens_per_s": round(requests.num_output_tokens / seconds, 1),
                "start_s": round(engine.start_s, 1),
            },
        )
