"""The gain of the CPU's int8 and bf16 products and of draws without noise and sorts, each against the code it replaces.

    python -m benchmarks.cpu_operators [--rounds N] [--threads N] [--parts products bf16 draws]

Products: SmolLM2-135M's, with 8-bit integers and in fp32, over as many copies of each weight as a step of the model
reads, so that none stays in the cache. bf16: rates beside torch's own products of that dtype, from weights that it has
reordered once and from plain ones, for SmolLM2-135M's layers and those of a model of a billion weights. Draws: 32 rows
of 49,152 tokens at temperature 1, the compiled operators and the plain definitions whose results they equal. All sides
take turns within a process; the least time of all rounds counts, and ratios are taken between those.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import RESULTS
from pagemill.kernels import noise, selection
from pagemill.kernels.cpu.matmul import bf16, fp32, int8, weight_packing
from pagemill.kernels.cpu.matmul.converted import PackedPanels

PRODUCTS = {"qkv": (576, 960), "o": (576, 576), "gate, up": (576, 3072), "down": (1536, 576)}
HEAD = "lm_head"
NUM_LAYERS, VOCABULARY, HIDDEN = 30, 49_152, 576
ROWS = (1, 2, 4, 8, 16, 32, 64)
BF16_SHAPES = ((576, 960), (576, 3072), (1536, 576), (2048, 16_384), (8192, 2048))
BF16_ROWS = (1, 8, 32, 128, 512)
DRAWING_ROWS = 32


def least_times(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each side, in turns; the first round, which warms up, does not count.

    A single thread's are the processor's, so that other processes of a busy machine are left out.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            started = clock()
            run()
            times[name].append(1e3 * (clock() - started))
    return {name: min(found[1:]) for name, found in times.items()}


def measure_products(rounds: int) -> list[dict[str, Any]]:
    found = []
    shapes = {**PRODUCTS, HEAD: (HIDDEN, VOCABULARY)}
    for name, (in_features, out_features) in shapes.items():
        weights = [torch.randn(out_features, in_features) for _ in range(1 if name == HEAD else NUM_LAYERS)]
        bias = torch.zeros(-(-out_features // fp32.PANEL) * fp32.PANEL)
        packed = [
            (multiply, [pack(weight) for weight in weights])
            for multiply, pack in (
                (fp32.multiply, weight_packing.pack),
                (partial(_multiply_int8, out_features=out_features), int8.pack),
            )
        ]
        del weights
        for num_rows in ROWS:
            x = torch.randn(num_rows, in_features)
            sides = {
                side: partial(_multiply_all, multiply, layers, x, bias)
                for side, (multiply, layers) in zip(("fp32", "int8"), packed, strict=True)
            }
            found.append({"product": name, "rows": num_rows, **least_times(sides, rounds)})
    return found


def _multiply_all(
    multiply: Callable[..., torch.Tensor],
    layers: list[Any],
    x: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    for layer in layers:
        multiply(x, layer, bias)


def _multiply_int8(
    x: torch.Tensor, packed: PackedPanels, bias: torch.Tensor, *, out_features: int
) -> torch.Tensor:
    return int8.multiply(x, packed, bias, out_features)


def measure_bf16(rounds: int) -> list[dict[str, Any]]:
    """GFLOP/s of each side; nothing on a CPU that would emulate it."""
    found: list[dict[str, Any]] = []
    if not bf16.is_native():
        return found
    for in_features, out_features in BF16_SHAPES:
        weight = torch.randn(out_features, in_features, dtype=torch.bfloat16)
        packed, bias = bf16.pack(weight), torch.zeros(-(-out_features // fp32.PANEL) * fp32.PANEL)
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        for num_rows in BF16_ROWS:
            rows = torch.randn(num_rows, in_features)
            halves = rows.bfloat16()
            sides: dict[str, Callable[[], object]] = {
                "ours": partial(bf16.multiply, rows, packed, bias, out_features),
                "torch reordered": partial(_multiply_reordered, halves, reordered),
                "torch": partial(torch.mm, halves, weight.t()),
            }
            times = least_times(sides, rounds)
            operations = 2e-6 * num_rows * in_features * out_features
            rates = {side: operations / milliseconds for side, milliseconds in times.items()}
            found.append({"in": in_features, "out": out_features, "rows": num_rows, **rates})
    return found


def _multiply_reordered(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return out


def measure_draws(rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    logits = 3 * torch.randn(DRAWING_ROWS, VOCABULARY)
    logits -= logits.amax(dim=-1, keepdim=True)
    rows = torch.arange(DRAWING_ROWS)
    keys = noise.noise_keys(rows, torch.zeros_like(rows), rows)
    counts, mass = torch.full_like(rows, 50), torch.full((DRAWING_ROWS,), 0.9, dtype=torch.float64)
    probabilities = logits.softmax(dim=-1)
    cases: dict[str, dict[str, Callable[[], object]]] = {
        "draw with noise": {
            "plain": lambda: noise.argmax_of_sums(logits, keys),
            "compiled": lambda: selection.argmax_with_noise(logits, keys),
        },
        "cut of top-k 50": {
            "plain": lambda: selection.kth_of_best(logits, counts),
            "compiled": lambda: selection.kth_largest(logits, counts),
        },
        "cut of top-p 0.9": {
            "plain": lambda: (logits.softmax(dim=-1), selection.top_p_of_best(logits, probabilities, mass)),
            "compiled": lambda: selection.top_p_thresholds(logits, mass),
        },
    }
    return [{"operator": name, **least_times(sides, rounds)} for name, sides in cases.items()]


PARTS = {"products": measure_products, "bf16": measure_bf16, "draws": measure_draws}


def tables(report: dict[str, Any]) -> list[Table]:
    products = Table(title="Products, ms for all layers: fp32 / int8 = ratio")
    products.add_column("rows", justify="right")
    names = [*PRODUCTS, HEAD]
    for name in [*names, "all"]:
        products.add_column(name, justify="right")
    for num_rows in ROWS if report["products"] else ():
        entries = {e["product"]: e for e in report["products"] if e["rows"] == num_rows}
        entries["all"] = {side: sum(entries[name][side] for name in names) for side in ("fp32", "int8")}
        cells = [
            f"{e['fp32']:.1f} / {e['int8']:.1f} = {e['fp32'] / e['int8']:.2f}"
            for e in (entries[name] for name in [*names, "all"])
        ]
        products.add_row(str(num_rows), *cells)
    halves = Table(
        title="Products of bfloat16, GFLOP/s: ours / torch, reordered once = ratio; torch's plain product"
    )
    for column in ("in", "out", *map(str, BF16_ROWS)):
        halves.add_column(column, justify="right")
    for shape in BF16_SHAPES if report["bf16"] else ():
        row = [e for e in report["bf16"] if (e["in"], e["out"]) == shape]
        cells = [
            f"{e['ours']:.0f} / {e['torch reordered']:.0f} = {e['ours'] / e['torch reordered']:.2f}; {e['torch']:.0f}"
            for e in row
        ]
        halves.add_row(*map(str, shape), *cells)
    draws = Table(title=f"Draws, ms for {DRAWING_ROWS} rows of {VOCABULARY:,} tokens")
    for column in ("operator", "plain", "compiled", "ratio"):
        draws.add_column(column, justify="right")
    for e in report["draws"]:
        ratio = e["plain"] / e["compiled"]
        draws.add_row(e["operator"], f"{e['plain']:.2f}", f"{e['compiled']:.2f}", f"{ratio:.1f}")
    return [products, halves, draws]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_operators", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started, where, console = datetime.now(UTC), machine.describe(), Console(width=160)
    report = {
        "question": "int8 products beside fp32, bf16 beside torch's, and draws beside their definitions",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "settings": {"rounds": arguments.rounds, "threads": arguments.threads},
        **{part: PARTS[part](arguments.rounds) if part in arguments.parts else [] for part in PARTS},
    }
    path = arguments.out or RESULTS / f"cpu-operators-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    for table in tables(report):
        console.print(table)
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
