"""A model over two devices: the same tokens as on one, and the speed of Llama-3.1-8B."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.engines import close_engine, generate, open_engine
from benchmarks.gpu.exactness import saved_model, tokens_of
from benchmarks.gpu.models import LLAMA_8B, uniform_requests
from benchmarks.gpu.section import Bench, Row


def run(bench: Bench) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        saved_model(directory)
        whole = tokens_of(bench, directory)
        overlaps = (True, False) if bench.device.type == "cuda" else (False,)
        for overlap in overlaps:
            spread = tokens_of(bench, directory, tensor_parallel_size=2, async_scheduling=overlap)
            count = sum(a != b for a, b in zip(whole, spread, strict=True))
            case = f"requests that differ from one device's, {'' if overlap else 'not '}overlapped"
            yield Row(case=case, measured=count, unit="requests", prediction=0, ok=count == 0)
    if not bench.is_tiny:
        engine = open_engine(bench, LLAMA_8B, tensor_parallel_size=2)
        seconds = generate(engine.llm, uniform_requests(engine.model, 256, 100, 1024, seed=0))
        yield Row(case="256 requests on two devices", measured=seconds, facts={"start_s": engine.start_s})
        close_engine()
