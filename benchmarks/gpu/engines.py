"""The engine for sections: a model's shapes with dummy weights, reused by the next section of the process."""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import TINY, ModelShape
from benchmarks.gpu.section import Bench, Row
from benchmarks.workloads import Workload
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

MOST_ROWS = 256
TOKEN_BUDGET = 8192


@dataclass
class OpenEngine:
    llm: LLM
    model: ModelShape
    start_s: float
    options: dict[str, Any]
    directory: tempfile.TemporaryDirectory[str]


_open: list[OpenEngine] = []


def shape_of(bench: Bench, model: ModelShape) -> ModelShape:
    """Return the model, or the toy that replaces every model."""
    return TINY if bench.is_tiny else model


def settings_of(bench: Bench) -> dict[str, Any]:
    """Return the options of `EngineConfig` that every engine and worker here has."""
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "verify": False,
        "device": bench.device.type,
    }
    if bench.is_tiny:
        small = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        return settings | small | {"num_kv_blocks": 128, "num_threads": 1}
    large = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": MOST_ROWS}
    return settings | large | {"max_num_batched_tokens": TOKEN_BUDGET}


def open_engine(bench: Bench, model: ModelShape, **options: Any) -> OpenEngine:
    """Return the engine that the previous section left open, if it has these options, or a new, warmed-up one."""
    model = shape_of(bench, model)
    if _open and (_open[0].model, _open[0].options) == (model, options):
        return _open[0]
    close_engine()
    started = time.perf_counter()
    directory = tempfile.TemporaryDirectory()
    path = model.save_config(Path(directory.name))
    llm = LLM(path, **(settings_of(bench) | options))
    # Compile kernels before the measurement, as in a warmed-up worker.
    generate(llm, Workload("warm-up", [[1] * 16, [2] * (16 if bench.is_tiny else 1024)], [4, 4]))
    freeze_heap()
    _open.append(OpenEngine(llm, model, time.perf_counter() - started, options, directory))
    return _open[0]


def compile_engine(bench: Bench, model: ModelShape, options: dict[str, Any]) -> list[Row]:
    """Start and close an engine of one layer, which compiles the kernels of a complete one."""
    small = {"num_kv_blocks": 512, "enforce_eager": True}
    with tempfile.TemporaryDirectory() as directory:
        path = replace(shape_of(bench, model), num_layers=1).save_config(Path(directory))
        started = time.perf_counter()
        LLM(path, **(settings_of(bench) | options | small)).close()
    return [Row(case=f"one layer of {model.name} {options or ''}", measured=time.perf_counter() - started)]


def close_engine() -> None:
    """Free the memory of the open engine, if there is one."""
    while _open:
        engine = _open.pop()
        engine.llm.close()
        engine.directory.cleanup()


def freeze_heap() -> None:
    """Freeze the heap, like a worker with a loaded model: otherwise full collections stop it for tenths of a second."""
    gc.collect()
    gc.freeze()


def generate(llm: LLM, requests: Workload) -> float:
    """Return the seconds of one pass over the requests; each stops at its length."""
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, seed=number)
        for number, length in enumerate(requests.max_tokens)
    ]
    started = time.perf_counter()
    results = llm.generate(requests.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = [len(result.outputs[0].token_ids) for result in results]
    if lengths != requests.max_tokens:
        errors = {result.error for result in results if result.error}
        raise RuntimeError(f"{sum(lengths)} tokens of {requests.num_output_tokens}: {errors or 'no error'}")
    return seconds
