"""The gain of the CPU's int8 products and of draws without noise and sorts, each against the code it replaces.

    python -m benchmarks.cpu_operators [--rounds N] [--threads N]

Products: SmolLM2-135M's, with 8-bit integers and in fp32, over as many copies of each weight as a step of the model
reads, so that none stays in the cache. Draws: 32 rows of 49,152 tokens at temperature 1, the compiled operators and
the plain definitions whose results they equal. Both sides take turns within a process; the least time of all rounds
counts, and ratios are taken between those.
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
from pagemill.kernels.cpu.matmul import fp32, int8, weight_packing

PRODUCTS = {"qkv": (576, 960), "o": (576, 576), "gate, up": (576, 3072), "down": (1536, 576)}
HEAD = "lm_head"
NUM_LAYERS, VOCABULARY, HIDDEN = 30, 49_152, 576
ROWS = (1, 2, 4, 8, 16, 32, 64)
DRAWING_ROWS = 32


def least_times(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each side, in turns; the first round, which warms up, does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - started))
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
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, *, out_features: int
) -> torch.Tensor:
    return int8.multiply(x, packed, bias, out_features)


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


def tables(report: dict[str, Any]) -> list[Table]:
    products = Table(title="Products, ms for all layers: fp32 / int8 = ratio")
    products.add_column("rows", justify="right")
    names = [*PRODUCTS, HEAD]
    for name in [*names, "all"]:
        products.add_column(name, justify="right")
    for num_rows in ROWS:
        entries = {e["product"]: e for e in report["products"] if e["rows"] == num_rows}
        entries["all"] = {side: sum(entries[name][side] for name in names) for side in ("fp32", "int8")}
        cells = [
            f"{e['fp32']:.1f} / {e['int8']:.1f} = {e['fp32'] / e['int8']:.2f}"
            for e in (entries[name] for name in [*names, "all"])
        ]
        products.add_row(str(num_rows), *cells)
    draws = Table(title=f"Draws, ms for {DRAWING_ROWS} rows of {VOCABULARY:,} tokens")
    for column in ("operator", "plain", "compiled", "ratio"):
        draws.add_column(column, justify="right")
    for e in report["draws"]:
        ratio = e["plain"] / e["compiled"]
        draws.add_row(e["operator"], f"{e['plain']:.2f}", f"{e['compiled']:.2f}", f"{ratio:.1f}")
    return [products, draws]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_operators", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started, where, console = datetime.now(UTC), machine.describe(), Console(width=160)
    report = {
        "question": "int8 products beside fp32, and draws without noise and sorts beside their definitions",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "settings": {"rounds": arguments.rounds, "threads": arguments.threads},
        "products": measure_products(arguments.rounds),
        "draws": measure_draws(arguments.rounds),
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
