"""Complete requests through the engine, offline: seconds compared with the lower bound of their steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.attention import load_fa3
from benchmarks.gpu.engines import MOST_ROWS, TOKEN_BUDGET, generate, open_engine, shape_of
from benchmarks.gpu.floors import CostModel, schedule
from benchmarks.gpu.models import (
    LLAMA_8B,
    QWEN_600M,
    ModelShape,
    random_tokens,
    uniform_requests,
)
from benchmarks.gpu.section import Bench, Row, Skipped
from benchmarks.workloads import Workload
from pagemill.engine.errors import ConfigError
from pagemill.kernels.gpu.attention_backend import Unavailable

_TARGET = 0.65
_LABELS_TARGET = 0.6
_FP8_GAIN = 1.5


def requests_of(bench: Bench, model: ModelShape, count: int) -> Workload:
    """Return `count` requests of 100 to 1,024 tokens in and out."""
    count, shortest, longest = (3, 3, 6) if bench.is_tiny else (count, 100, 1024)
    return uniform_requests(shape_of(bench, model), count, shortest, longest, seed=count)


def run(bench: Bench) -> Iterator[Row]:
    """All rows that a step supports, and a quarter of them."""
    yield from _timed(bench, LLAMA_8B, (256, 64))


def run_qwen(bench: Bench) -> Iterator[Row]:
    """A model whose steps are so short that the host and the launches determine the time."""
    yield from _timed(bench, QWEN_600M, (256,))


def run_fp8(bench: Bench) -> Iterator[Row]:
    try:
        rows = list(_timed(bench, LLAMA_8B, (256,), quantization="fp8"))
    except ConfigError as error:
        raise Skipped(str(error)) from None
    yield from rows
    half = seconds_of(bench, "256 requests")
    if half is not None and rows[0].measured:
        yield Row(case="bf16 / fp8", measured=half / rows[0].measured, unit="x", target=_FP8_GAIN)


def run_fa3(bench: Bench) -> Iterator[Row]:
    try:
        load_fa3(bench)
    except Unavailable as reason:
        raise Skipped(str(reason)) from None
    rows = list(_timed(bench, LLAMA_8B, (256,), attention_backend="fa3"))
    yield from rows
    ours = seconds_of(bench, "256 requests")
    if ours is not None and rows[0].measured:
        yield Row(case="triton / fa3", measured=ours / rows[0].measured, unit="x")


def run_labels(bench: Bench) -> Iterator[Row]:
    """256 tokens shared by all prompts, 40 separate ones, 4 output tokens: every step admits rows."""
    count, shared, own, outputs = (6, 32, 5, 2) if bench.is_tiny else (4096, 256, 40, 4)
    engine = open_engine(bench, LLAMA_8B)
    draw = random.Random(f"labels {count}")
    prefix = random_tokens(draw, engine.model, shared)
    prompts = [prefix + random_tokens(draw, engine.model, own) for _ in range(count)]
    requests = Workload("labels", prompts, [outputs] * count)
    # The first prompt fills the cache, as the first job of a batch does.
    generate(engine.llm, Workload("first", prompts[:1], [outputs]))
    seconds = generate(engine.llm, requests)
    steps = list(schedule(requests.sizes, most_rows=MOST_ROWS, token_budget=TOKEN_BUDGET, cached=shared))
    yield Row(
        case=f"{count} jobs of {shared} + {own} tokens, {outputs} out",
        measured=seconds,
        floor=bench.floor.workload(engine.model, steps),
        target=_LABELS_TARGET,
        facts={"jobs_per_s": round(count / seconds, 1), "model": engine.model.name},
    )


def memory_of(bench: Bench) -> dict[str, float]:
    """Return the GiB that are free on the device, and those that torch's allocator holds."""
    if bench.device.type != "cuda":
        return {}
    free, reserved = torch.cuda.mem_get_info(bench.device)[0], torch.cuda.memory_reserved(bench.device)
    return {"free_gib": round(free / 2**30, 2), "reserved_gib": round(reserved / 2**30, 2)}


def seconds_of(bench: Bench, case: str) -> float | None:
    """Return the bf16 engine's time for a case earlier in this run."""
    rows = bench.found.get("generation", ())
    return next((row.measured for row in rows if row.case == case), None)


def workload_seconds(cost: CostModel, model: ModelShape, requests: Workload, *, fp8: bool = False) -> float:
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
            target=_TARGET if model is LLAMA_8B and not options else None,
            facts={
                "model": engine.model.name,
                "requests": len(requests.prompts),
                "output_tokens": requests.num_output_tokens,
                "tokens_per_s": round(requests.num_output_tokens / seconds, 1),
                "start_s": round(engine.start_s, 1),
                **memory_of(bench),
            },
        )
