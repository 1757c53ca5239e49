"""A mixture of experts with random weights: this engine beside transformers' own `generate` and vLLM, fp32, in one run.

    python -m benchmarks.engines.experts [--layers 12] [--experts 64] [--rows 1 8 32] [--rounds 3]

Decode: every row brings 8 tokens and gets 64. Prompt: requests of 512 tokens that get one. Engines take turns as in
`benchmarks.throughput`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import machine
from benchmarks.engines import peers
from benchmarks.engines.contenders import REFERENCE, SUBJECT, Contender
from benchmarks.measure import Request
from benchmarks.report import result_path, write
from benchmarks.throughput import Measurements, Spread, measure_all, passes_as_json, ratio_cell
from benchmarks.workloads import LOWEST_TOKEN_ID, Workload

VOCAB_SIZE = 32_000
DECODE_IN, DECODE_OUT = 8, 64
PROMPTS, PROMPT_IN = 4, 512
KV_CACHE_BYTES = 2**30
VLLM = Contender("vllm", "benchmarks.engines.vllm", "vLLM's CPU build, offline", peers.VLLM)


def contenders(rows: int) -> list[Contender]:
    """Return who takes part; transformers gets all rows in one batch."""
    ours = Contender(
        SUBJECT,
        "benchmarks.engines.pagemill",
        "this engine, offline",
        options=(("dtype", "float32"), ("enable_prefix_caching", False)),
    )
    theirs = Contender(
        REFERENCE,
        "benchmarks.engines.static_batches",
        "generate(), one batch",
        options=(("batch_size", rows),),
    )
    if peers.VLLM.python() is None:
        print("vllm: no environment for it; see python -m benchmarks --install-peers", file=sys.stderr)
        return [ours, theirs]
    return [ours, theirs, VLLM]


def build_workloads(rows: Sequence[int], seed: int) -> list[Workload]:
    rng = random.Random(f"experts {seed}")

    def workload(name: str, count: int, length: int, new: int) -> Workload:
        prompts = [[rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]
        return Workload(name, prompts, [new] * count)

    decode = [workload(f"decode-{count}", count, DECODE_IN, DECODE_OUT) for count in rows]
    return [*decode, workload("prompt", PROMPTS, PROMPT_IN, 1)]


def write_model(folder: Path, options: argparse.Namespace) -> int:
    """Write a Qwen3-MoE of fp32 numbers; returns its parameters."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=options.inner * 8,
        moe_intermediate_size=options.inner,
        num_experts=options.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    count = int(sum(parameter.numel() for parameter in model.parameters()))
    del model
    gc.collect()
    return count


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    view = Table(title="Tokens per second (fp32; prompt: tokens read, else tokens made)")
    columns = ("workload", "engine", "median", "lowest", "best", f"{SUBJECT} is")
    for column in columns:
        view.add_column(column, justify="left" if column in ("workload", "engine") else "right")
    for workload in workloads:
        scale = PROMPT_IN if workload.name == "prompt" else 1
        for name in measurements.contenders:
            rates = Spread.of(measurements.rates(name, workload.name))
            figures = (f"{scale * rate:.1f}" for rate in (rates.median, rates.low, rates.high))
            view.add_row(
                workload.name, name, *figures, ratio_cell(measurements, SUBJECT, name, workload.name)
            )
    return view


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    started, where = datetime.now(UTC), machine.describe()
    workloads, warmup = build_workloads(given.rows, 0), build_workloads(given.rows, 1)
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="pagemill-experts-") as folder:
        parameters = write_model(Path(folder), given)
        console.print(f"{parameters / 1e6:.0f} million parameters")
        request = Request(folder, warmup, 1024, KV_CACHE_BYTES)
        passes = measure_all(
            measurements, contenders(max(given.rows)), request, workloads, vocab_size=VOCAB_SIZE,
            rounds=given.rounds, console=console,
        )  # fmt: skip
        with contextlib.closing(passes):
            for _ in passes:
                pass
    if not measurements.passes:
        return 1
    console.print(table(measurements, workloads))
    path = given.out or result_path("experts", started)
    write(
        path,
        {
            "question": "tokens per second of a random Qwen3-MoE, greedy, fp32",
            "date": started.isoformat(timespec="seconds"),
            "machine": where,
            "parameters": parameters,
            "settings": {name: value for name, value in vars(given).items() if name != "out"},
            "versions": {name: ready.versions for name, ready in measurements.ready.items()},
            "peak_memory_bytes": measurements.peak_memory_bytes,
            "failures": measurements.failures,
            "passes": passes_as_json(measurements),
        },
    )
    console.print(f"written to {path}")
    return 1 if measurements.failures else 0


if __name__ == "__main__":
    sys.exit(main())
