"""Checks outputs of a small saved model, whose weights distinguish tokens clearly."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engines import close_engine, generate, open_engine
from benchmarks.gpu.models import LLAMA_8B, TINY, uniform_requests
from benchmarks.gpu.section import Bench, Row
from benchmarks.workloads import Workload

_OFF = {"enforce_eager": True, "async_scheduling": False, "stage_inputs": False}
_LEFT_BYTES = 64 << 20
"""Memory that the second engine can leave on the device in addition to what libraries kept from the first."""


def run_start(bench: Bench) -> Iterator[Row]:
    """Two consecutive starts of the engine, with graphs; both must give transformers' tokens."""
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


def run_switches(bench: Bench) -> Iterator[Row]:
    """Tokens with overlap, graphs and one copy per step on and off, compared with transformers' greedy tokens."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = saved_model(directory)
        plain = tokens_of(bench, directory, **_OFF)
        yield _differing("all off, beside transformers", differs_from_transformers(bench, model, plain))
        model.to("cpu")
        for switch in _OFF:
            outputs = tokens_of(bench, directory, **(_OFF | {switch: not _OFF[switch]}))
            yield _differing(switch, _unequal(plain, outputs))
        yield _differing("as a user has them", _unequal(plain, tokens_of(bench, directory)))


def run_ranks(bench: Bench) -> Iterator[Row]:
    """A model over two devices: the same tokens as on one, and the speed of Llama-3.1-8B."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        saved_model(directory)
        whole = tokens_of(bench, directory)
        for overlap in (True, False) if bench.device.type == "cuda" else (False,):
            spread = tokens_of(bench, directory, tensor_parallel_size=2, async_scheduling=overlap)
            case = f"requests that differ from one device's, {'' if overlap else 'not '}overlapped"
            yield _differing(case, _unequal(whole, spread))
    if not bench.is_tiny:
        engine = open_engine(bench, LLAMA_8B, tensor_parallel_size=2)
        seconds = generate(engine.llm, uniform_requests(engine.model, 256, 100, 1024, seed=0))
        yield Row(case="256 requests on two devices", measured=seconds, facts={"start_s": engine.start_s})
        close_engine()


def _differing(case: str, count: int) -> Row:
    return Row(case=case, measured=count, unit="requests", ok=count == 0)


def _unequal(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))


def saved_model(directory: Path) -> Any:
    """Return a transformers model with random weights, and save it to `directory`.

    Small and in fp32: matmul rows can be summed in another order, but that hardly ever changes a token.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    TINY.save_config(directory)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # wide, so that candidates are rarely close
    model.save_pretrained(directory)
    return model.eval()


def requests_of(bench: Bench) -> Workload:
    count, shortest, longest = (3, 3, 6) if bench.is_tiny else (12, 8, 48)
    return uniform_requests(TINY, count, shortest, longest, seed=0)


def tokens_of(bench: Bench, directory: Path, **options: Any) -> list[list[int]]:
    """Return a saved model's outputs for the requests, every other one greedy; `options` of `EngineConfig`."""
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    requests = requests_of(bench)
    params = [
        SamplingParams(
            temperature=0.9 * (number % 2), top_p=0.9, seed=number, max_tokens=length, ignore_eos=True
        )
        for number, length in enumerate(requests.max_tokens)
    ]
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 256}
    llm = LLM(str(directory), **(settings | {"num_threads": 1, "device": bench.device.type} | options))
    try:
        results = llm.generate(requests.prompts, params, use_tqdm=False)
    finally:
        llm.close()
    return [result.outputs[0].token_ids for result in results]


def differs_from_transformers(bench: Bench, model: Any, outputs: list[list[int]]) -> int:
    """Count the greedy outputs in which transformers would have chosen another token at any position."""
    requests, count = requests_of(bench), 0
    model = model.to(bench.device)
    with torch.inference_mode():
        for prompt, output in list(zip(requests.prompts, outputs, strict=True))[::2]:
            whole = torch.tensor([prompt + output[:-1]], device=bench.device)
            greedy = model(whole, use_cache=False).logits[0, len(prompt) - 1 :].argmax(dim=-1)
            count += int(greedy.tolist() != output)
    return count
