"""How fast does a quantised checkpoint decode on a CPU, beside the same model of 32 and of 16 bits a weight?

    python -m benchmarks.engines.quantized [--rounds N] [--rows N ...] [--tokens N]

The packaged model's own file holds 4-bit integers, which the CPU finds and keeps (docs/quantization.md): its weights
get noise of a thousandth first, so that fp32 takes 32 bits. From these are written, as publishers write them: fp32,
bf16, W4A16 (compressed-tensors, symmetric, groups of 64, the rest bf16) and FP8 (the same, a scale per output).
Engines take turns, every other round backwards; a ratio is taken within a round, and the median of them is told. On a
machine that others use as well, the processors' time says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks import machine
from benchmarks.report import model_directory, result_path, write
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

GROUP = 64  # of the usual sizes the largest that divides SmolLM2-135M's 576 inputs
NOISE = 1e-3
PROMPT, VOCAB = 32, 1000
BASELINE = "fp32"
Tensors = dict[str, torch.Tensor]


def w4a16(weight: torch.Tensor) -> Tensors:
    """Round to nearest, as `pack-quantized` stores it."""
    out_features, in_features = weight.shape
    grouped = weight.view(out_features, -1, GROUP)
    scales = (grouped.abs().amax(2) / 7.5).bfloat16()
    numbers = (grouped / scales.float()[:, :, None]).round().clamp(-8, 7).view(out_features, -1, 8) + 8
    words = (numbers.long() << torch.arange(0, 32, 4)).sum(2)
    return {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out_features, in_features]),
    }


def float8(weight: torch.Tensor) -> Tensors:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return {"weight": (weight / scales.float()).to(torch.float8_e4m3fn), "weight_scale": scales}


def _settings(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


VARIANTS: dict[str, tuple[torch.dtype, Any, dict[str, Any] | None]] = {
    BASELINE: (torch.float32, None, None),
    "bf16": (torch.bfloat16, None, None),
    "fp8": (
        torch.bfloat16,
        float8,
        _settings("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "w4a16": (
        torch.bfloat16,
        w4a16,
        _settings("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    ),
}
"""By name: the dtype of what is not quantised, how a linear layer is stored, and what config.json says of it."""


def write_variant(source: Path, name: str, target: Path) -> Path:
    """Write one of `VARIANTS` of the model at `source`."""
    dtype, store, settings = VARIANTS[name]
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json" and not file.name.endswith("index.json"):
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(config))
    generator, out = torch.Generator().manual_seed(1), {}
    for file in sorted(source.glob("*.safetensors")):
        for key, tensor in sorted(load_file(file).items()):
            numbers = tensor.float()
            numbers = numbers * (1 + NOISE * torch.randn(numbers.shape, generator=generator))
            if store is not None and key.endswith("_proj.weight"):
                stem = key.removesuffix("weight")
                out |= {stem + part: value.contiguous() for part, value in store(numbers).items()}
            else:
                out[key] = numbers.to(dtype)
    save_file(out, target / "model.safetensors", {"format": "pt"})
    return target


def decode_seconds(llm: LLM, num_rows: int, num_tokens: int) -> tuple[float, float]:
    """Return what a step of decoding takes, on the clock and of the processors: the prompts' share is taken off."""
    prompts = [[(7 * row + i) % VOCAB + 5 for i in range(PROMPT)] for row in range(num_rows)]

    def seconds(length: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        started, worked = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, time.process_time() - worked

    first, whole = seconds(1), seconds(num_tokens)
    steps = num_tokens - 1
    return (whole[0] - first[0]) / steps, (whole[1] - first[1]) / steps


def measure(directory: Path, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    source = model_directory(arguments.model)
    engines = {}
    for name in VARIANTS:
        path = write_variant(source, name, directory / name)
        engines[name] = LLM(
            str(path),
            num_kv_blocks=512,
            num_threads=arguments.threads,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
    seconds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for rows in arguments.rows:
        found = seconds[rows] = {name: [] for name in engines}
        for turn in range(-1, arguments.rounds):
            for name in list(engines)[:: 1 if turn % 2 == 0 else -1]:
                step = decode_seconds(engines[name], rows, arguments.tokens)
                if turn >= 0:  # the first round warms up
                    found[name].append(step)
            console.print(
                rows, {name: [round(n, 4) for n in each[-1]] for name, each in found.items() if each}
            )
    return {
        "weight_bytes": {name: llm.engine.stats().memory_bytes["weights"] for name, llm in engines.items()},
        "step_seconds_and_processor_seconds": seconds,
        "speed_beside_fp32": {
            rows: {name: _ratios(found[BASELINE], each) for name, each in found.items()}
            for rows, found in seconds.items()
        },
    }


def _ratios(base: list[tuple[float, float]], each: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of how many times faster than the base it was, on the clock and by processor time."""
    pairs = list(zip(base, each, strict=True))
    return statistics.median(b[0] / e[0] for b, e in pairs), statistics.median(b[1] / e[1] for b, e in pairs)


def table(figures: dict[str, Any]) -> Table:
    view = Table(title="Decoding, times as fast as fp32: on the clock, by processor time (medians of rounds)")
    view.add_column("weights")
    view.add_column("MiB", justify="right")
    ratios = figures["speed_beside_fp32"]
    for rows in ratios:
        view.add_column(f"{rows} rows", justify="right")
    for name in VARIANTS:
        cells = [f"{ratios[rows][name][0]:.2f}, {ratios[rows][name][1]:.2f}" for rows in ratios]
        view.add_row(name, f"{figures['weight_bytes'][name] / 2**20:.0f}", *cells)
    return view


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.quantized", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a Hugging Face directory, or smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    started, where, console = datetime.now(UTC), machine.describe(), Console(width=140)
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), arguments, console)
    path = arguments.out or result_path("quantized", started)
    settings = {"rounds": arguments.rounds, "tokens": arguments.tokens, "threads": arguments.threads,
                "prompt": PROMPT, "group": GROUP}  # fmt: skip
    question = "decode speed of quantised checkpoints beside fp32"
    head = {"question": question, "date": started.isoformat(timespec="seconds"), "machine": where}
    write(path, head | {"model": arguments.model, "settings": settings} | figures)
    console.print(table(figures))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
