"""Label jobs: 256 tokens that all prompts share, 40 of their own, 4 out. Every step admits rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.gpu.engines import MOST_ROWS, TOKEN_BUDGET, generate, open_engine
from benchmarks.gpu.floors import schedule
from benchmarks.gpu.models import LLAMA_8B, ModelShape, Requests, random_tokens
from benchmarks.gpu.section import Bench, Row

_TARGET = 0.6


def label_requests(model: ModelShape, count: int, shared: int, own: int, outputs: int) -> Requests:
    draw = random.Random(f"labels {count}")
    prefix = random_tokens(draw, model, shared)
    return Requests([prefix + random_tokens(draw, model, own) for _ in range(count)], [outputs] * count)


def run(bench: Bench) -> Iterator[Row]:
    count, shared, own, outputs = (6, 32, 5, 2) if bench.is_tiny else (4096, 256, 40, 4)
    engine = open_engine(bench, LLAMA_8B)
    requests = label_requests(engine.model, count, shared, own, outputs)
    # The first prompt fills the cache, as the first job of a batch does.
    generate(engine.llm, Requests([requests.prompts[0]], [outputs]))
    seconds = generate(engine.llm, requests)
    steps = list(schedule(requests.sizes, most_rows=MOST_ROWS, token_budget=TOKEN_BUDGET, cached=shared))
    yield Row(
        case=f"{count} jobs of {shared} + {own} tokens, {outputs} out",
        measured=seconds,
        floor=bench.floor.workload(engine.model, steps),
        prediction=bench.expected.workload(engine.model, steps),
        target=_TARGET,
        facts={"jobs_per_s": round(count / seconds, 1), "model": engine.model.name},
    )
