"""Every section of `benchmarks.gpu`, in the order of its part: first what a short lease should bring first."""

from __future__ import annotations

import torch

from benchmarks.gpu.section import Bench, Part, Section
from benchmarks.gpu.sections import (
    ceilings,
    correctness,
    decode,
    fp8_kv,
    fused,
    generation,
    labels,
    launches,
    peer,
    prefill,
    ragged,
    ranks,
    sampling,
    start,
    steps,
    switches,
    tiles,
    versions,
    worker,
)

ALWAYS = ("versions", "ceilings")
"""Run with every choice of sections: figures mean nothing without them."""


def _two_devices(bench: Bench) -> str | None:
    count = torch.cuda.device_count()
    return None if bench.is_tiny or count >= 2 else f"{count} GPU here, 2 needed"


def _fp8_products(bench: Bench) -> str | None:
    if not generation.knows_fp8():
        return 'EngineConfig.quantization has no "fp8"'
    return "a CPU has no fp8 products" if bench.device.type == "cpu" else None


def _opening(part: Part) -> tuple[Section, ...]:
    return (
        Section(
            name="versions",
            part=part,
            seconds=12,
            run=versions.run,
            question="What was measured?",
            hint="the versions in pyproject.toml's extra worker; nvidia-smi for other programs on the card",
        ),
        Section(
            name="ceilings",
            part=part,
            seconds=15,
            run=ceilings.run,
            question="What are the rates that a copy and a product reach?",
        ),
    )


SECTIONS: tuple[Section, ...] = (
    _opening("preflight")[0],
    Section(
        name="launches",
        part="preflight",
        seconds=35,
        run=launches.run,
        question="Does every kernel run, and compute what fp64 does?",
        hint="the row whose ok is false; then compute-sanitizer python -m benchmarks.gpu --part preflight "
        "--sections launches, and the kernel's file in kernels/gpu",
    ),
    Section(
        name="start",
        part="preflight",
        seconds=30,
        run=start.run,
        question="Does the engine start twice, and say what transformers says?",
        hint="the log; engine/execution/cuda_graphs.py if capture failed, else --part 1 --sections switches",
    ),
    *_opening("1"),
    Section(
        name="correctness",
        part="1",
        seconds=155,
        run=correctness.run,
        question="How far from fp64 is every kernel, over every shape and dtype?",
        hint="the rows whose ok is false: kernels/gpu has a file for each kernel",
    ),
    Section(
        name="switches",
        part="1",
        seconds=50,
        run=switches.run,
        question="Do graphs, overlap and staging leave all tokens as they are?",
        hint="the switch whose count is not 0: engine/execution/cuda_graphs.py, staging.py, or the overlap",
    ),
    Section(
        name="decode",
        part="1",
        seconds=62,
        run=decode.run,
        question="Does decode attention read keys at the rate of a copy?",
    ),
    Section(
        name="ragged",
        part="1",
        seconds=20,
        run=ragged.run,
        question="What does one long row cost the short ones beside it?",
    ),
    Section(
        name="prefill",
        part="1",
        seconds=45,
        run=prefill.run,
        question="What share of a product's rate does prompt attention reach?",
    ),
    Section(
        name="sampling",
        part="1",
        seconds=22,
        run=sampling.run,
        question="What do top-k, top-p and min-p cost beside plain temperature?",
    ),
    Section(
        name="fp8-kv",
        part="1",
        seconds=25,
        run=fp8_kv.run,
        question="Is a cache of half the bytes read in half the time?",
    ),
    Section(
        name="fused",
        part="1",
        seconds=24,
        run=fused.run,
        question="Do norms, activations and the cache's write move bytes at the rate of a copy?",
    ),
    Section(
        name="tiles",
        part="1",
        seconds=90,
        run=tiles.run,
        question="Which tiles belong into the tuning table?",
    ),
    *_opening("2"),
    Section(
        name="generation",
        part="2",
        seconds=85,
        run=generation.run,
        question="What share of its floor does Llama-3.1-8B reach in bf16?",
    ),
    Section(
        name="steps",
        part="2",
        seconds=40,
        run=steps.run,
        question="What does a decode step take, and what does a prompt beside it add?",
    ),
    Section(
        name="labels",
        part="2",
        seconds=35,
        run=labels.run,
        question="What share of their floor do label jobs reach?",
    ),
    Section(
        name="generation-fp8",
        part="2",
        seconds=60,
        run=generation.run_fp8,
        needs=(_fp8_products,),
        question="How much faster is it with fp8 products?",
    ),
    Section(
        name="worker",
        part="2",
        seconds=115,
        run=worker.run,
        needs=(worker.lacks_server,),
        is_alone=True,
        question="What of the bare engine's rate is left through Redis, all at once and at a steady rate?",
    ),
    Section(
        name="peer",
        part="2",
        seconds=80,
        run=peer.run,
        is_alone=True,
        question="How many times generate_batch's rate is ours?",
    ),
    Section(
        name="generation-qwen",
        part="2",
        seconds=38,
        run=generation.run_qwen,
        is_alone=True,
        question="What share does a small model reach, whose steps are short?",
    ),
    Section(
        name="ranks",
        part="2",
        seconds=40,
        run=ranks.run,
        needs=(_two_devices,),
        is_alone=True,
        question="Are tokens the same over two devices, and how fast?",
    ),
)


def of_part(part: Part) -> list[Section]:
    return [section for section in SECTIONS if section.part == part]
