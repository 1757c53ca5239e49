"""transformers' continuous batching (`generate_batch`'s manager) over the same requests as 64 of ours.

The manager rather than `generate_batch` itself, which has one output length for all and can't be stopped: what has
ended by the time limit counts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engines import freeze_heap, shape_of
from benchmarks.gpu.models import LLAMA_8B, Requests
from benchmarks.gpu.section import Bench, Row
from benchmarks.gpu.sections.generation import requests_of, seconds_of

_TARGET = 3.0
_SPARE_S = 10.0
"""Of the section's time, to say what has ended."""


def run(bench: Bench) -> Iterator[Row]:
    ends = time.perf_counter() + bench.seconds - _SPARE_S
    requests = requests_of(bench, LLAMA_8B, 64)
    with tempfile.TemporaryDirectory() as directory:
        manager = _started(bench, Path(directory), requests)
    freeze_heap()
    try:
        seconds, lengths = _pass(manager, requests, ends)
    finally:
        manager.stop(block=False)
    facts: dict[str, Any] = {"ended": len(lengths), "requests": len(requests), "output_tokens": sum(lengths)}
    facts["tokens_per_s"] = round(sum(lengths) / seconds, 1)
    yield Row(case="64 requests by generate_batch", measured=seconds, facts=facts)
    ours = seconds_of(bench, "64 requests")
    if ours is not None and any(lengths):
        ratio = (requests.num_output_tokens / ours) / (sum(lengths) / seconds)
        yield Row(case="pagemill / generate_batch", measured=ratio, unit="x", prediction=4.0, target=_TARGET)


def _started(bench: Bench, directory: Path, requests: Requests) -> Any:
    """Return a manager that has generated."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    config = AutoConfig.from_pretrained(shape_of(bench, LLAMA_8B).save_config(directory))
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    settings = GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
    # A GPU's memory it divides up by itself; of a CPU's it would take nearly all that the machine has.
    on_cpu = bench.device.type == "cpu"
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if on_cpu else None
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=room)
    manager.start()
    manager.add_request(requests.prompts[0], max_new_tokens=4)
    while manager.get_result(timeout=1.0) is None:
        if not manager.is_running():
            raise RuntimeError("transformers' generation thread has ended")
    return manager


def _pass(manager: Any, requests: Requests, ends: float) -> tuple[float, list[int]]:
    """Return (seconds, the lengths of the outputs that ended in them), by `time.perf_counter` until `ends` at most."""
    started = time.perf_counter()
    for prompt, length in zip(requests.prompts, requests.lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    lengths: list[int] = []
    while len(lengths) < len(requests) and time.perf_counter() < ends and manager.is_running():
        output = manager.get_result(timeout=1.0)
        if output is not None:
            lengths.append(len(output.generated_tokens))
    return time.perf_counter() - started, lengths
