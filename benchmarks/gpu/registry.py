"""Every section of `benchmarks.gpu`, in the order of its part: the most important results first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.section import Bench, Part, Section
from benchmarks.gpu.sections import (
    correctness,
    decode,
    exactness,
    fused,
    generation,
    models,
    opening,
    prefill,
    steps,
    tiles,
    worker,
)

ALWAYS = ("versions", "ceilings")
"""Run with every choice of sections: results are meaningless without them."""


def _two_devices(bench: Bench) -> str | None:
    count = torch.cuda.device_count()
    return None if bench.is_tiny or count >= 2 else f"{count} GPU here, 2 needed"


def _fp8_products(bench: Bench) -> str | None:
    return "a CPU has no fp8 products" if bench.device.type == "cpu" else None


def _gpu_libraries(bench: Bench) -> str | None:
    return "a CPU has no attention libraries" if bench.device.type == "cpu" else None


def _opening(part: Part) -> tuple[Section, Section]:
    hint = "the versions in pyproject.toml's extra worker; nvidia-smi for other programs on the card"
    return (
        Section("versions", part, 12, opening.run_versions, "What was measured?", hint=hint),
        Section(
            "ceilings", part, 15, opening.run_ceilings, "What are the rates that a copy and a product reach?"
        ),
    )


_BASE: tuple[Section, ...] = (
    _opening("preflight")[0],
    Section(
        "launches", "preflight", 90, correctness.run_launches, "Does every kernel run, and compute what fp64 does?",
        hint="the row whose ok is false; then compute-sanitizer python -m benchmarks.gpu --part preflight "
        "--sections launches, and the kernel's file in kernels/gpu",
    ),
    Section(
        "start", "preflight", 60, exactness.run_start, "Does the engine start twice, and say what transformers says?",
        hint="the log; engine/execution/cuda_graphs.py if capture failed, else --part 1 --sections switches",
    ),
    *_opening("1"),
    Section(
        "correctness", "1", 155, correctness.run, "How far from fp64 is every kernel, over every shape and dtype?",
        hint="the rows whose ok is false: kernels/gpu has a file for each kernel",
    ),
    Section(
        "switches", "1", 50, exactness.run_switches, "Do graphs, overlap and staging leave all tokens as they are?",
        hint="the switch whose count is not 0: engine/execution/cuda_graphs.py, staging.py, or the overlap",
    ),
    Section("decode", "1", 62, decode.run, "Does decode attention read keys at the rate of a copy?"),
    Section("ragged", "1", 20, decode.run_ragged, "What does one long row cost the short ones beside it?"),
    Section("prefill", "1", 45, prefill.run, "What share of a product's rate does prompt attention reach?"),
    Section(
        "fa3", "1", 20, correctness.run_fa3, "How far from fp64 is FlashAttention 3?",
        hint="kernels/gpu/flash_attention.py",
    ),
    Section("sampling", "1", 22, fused.run_sampling, "What do top-k, top-p and min-p cost beside plain temperature?"),
    Section("fp8-kv", "1", 25, decode.run_fp8_kv, "Is a cache of half the bytes read in half the time?"),
    Section(
        "fused", "1", 24, fused.run, "Do norms, activations and the cache's write move bytes at the rate of a copy?"
    ),
    Section("tiles", "1", 70, tiles.run, "Which tiles belong into the tuning table?"),
    *_opening("2"),
    Section("generation", "2", 60, generation.run, "What share of its floor does Llama-3.1-8B reach in bf16?"),
    Section("steps", "2", 40, steps.run, "What does a decode step take, and what does a prompt beside it add?"),
    Section("labels", "2", 35, generation.run_labels, "What share of their floor do label jobs reach?"),
    Section(
        "generation-fp8", "2", 45, generation.run_fp8, "How much faster is it with fp8 products?",
        needs=(_fp8_products,),
    ),
    Section(
        "generation-fa3", "2", 45, generation.run_fa3, "How much faster is it with FlashAttention 3?",
        needs=(_gpu_libraries,),
    ),
    Section(
        "models", "2", 75, models.run, "Does every type of decoder say what transformers says?",
        hint="the row's reason; the type in docs/models.md", is_alone=True,
    ),
    Section(
        "worker", "2", 100, worker.run,
        "What of the bare engine's rate is left through Redis?",
        needs=(worker.lacks_packages,), is_alone=True,
    ),
    Section(
        "generation-qwen", "2", 38, generation.run_qwen,
        "What share does a small model reach, whose steps are short?", is_alone=True,
    ),
    Section(
        "ranks", "2", 40, exactness.run_ranks, "Are tokens the same over two devices, and how fast?",
        needs=(_two_devices,), is_alone=True,
    ),
)  # fmt: skip


def _of_first(part: Part, name: str, seconds: float, **changes: Any) -> Section:
    """Return another part's section as one of part `first`."""
    section = next(each for each in _BASE if (each.part, each.name) == (part, name))
    return replace(section, part="first", seconds=seconds, **changes)


SECTIONS: tuple[Section, ...] = (
    *_BASE,
    _opening("first")[0],
    _of_first("preflight", "launches", 100),
    _of_first("preflight", "start", 60),
    _opening("first")[1],
    _of_first("2", "generation", 90),
    _of_first("2", "steps", 40),
    _of_first("2", "labels", 35),
    _of_first("1", "sampling", 25),
    _of_first("1", "decode", 30, run=decode.run_headline),
    _of_first("1", "ragged", 15),
    _of_first("1", "prefill", 20, run=prefill.run_headline),
    _of_first("2", "generation-fp8", 50),
    Section(
        "steps-fp8", "first", 25, steps.run_fp8, "What does a step take with fp8 products?", needs=(_fp8_products,),
    ),
    _of_first("2", "generation-qwen", 40),
)  # fmt: skip


def of_part(part: Part) -> list[Section]:
    return [section for section in SECTIONS if section.part == part]
