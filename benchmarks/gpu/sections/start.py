"""Two starts of the engine one after the other, with graphs, and transformers' own tokens from both."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.exactness import differs_from_transformers, saved_model, tokens_of
from benchmarks.gpu.section import Bench, Row

_LEFT_BYTES = 64 << 20
"""What the second engine may leave on the device beyond what libraries kept of the first."""


def run(bench: Bench) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, left = saved_model(directory), list[int]()
        for number in ("first", "second"):
            started = time.perf_counter()
            outputs = tokens_of(bench, directory)
            seconds = time.perf_counter() - started
            wrong = differs_from_transformers(bench, model, outputs)
            yield Row(case=f"{number} engine: start and generation", measured=seconds)
            case = f"{number} engine: outputs that differ from transformers'"
            yield Row(case=case, measured=wrong, unit="requests", ok=wrong == 0)
            model.to("cpu")
            gc.collect()
            left.append(torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0)
    grown = left[1] - left[0]
    yield Row(case="memory that a closed engine keeps", ok=grown <= _LEFT_BYTES, facts={"bytes": left})
