"""Upper bounds of a CPU: memory bandwidth and matmul rate, and the resulting tokens per second.

    python -m benchmarks.roofs [--throughput FILE] [--rounds N]

Bandwidth: summing 512 MiB. Matmuls: torch's (fp32 and bfloat16, with reordered weights) and Pagemill's, over
copies of SmolLM2's widest weight and of a large one, at the rows of a decode step and of a prompt. The best
of all is the bound of its dtype; int8 is compared only with Pagemill's. A workload's bound processes prompts
at that rate, and decodes at it or at the bandwidth, whichever is slower, with no other work. `--throughput`:
a file of `python -m benchmarks`, whose medians are shown as shares of the bounds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.workloads import WORKLOADS, Workload
from pagemill.kernels.cpu.matmul import bf16, fp32, int8, weight_packing
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL

SHAPES = ((576, 3072), (2048, 8192))
ROWS = (32, 512)
STREAMED_BYTES = 1 << 29
BYTES_PER_WEIGHT = {"fp32": 0.75, "bf16": 2.0, "int8": 1.125}
"""In fp32 the packaged model's weights are stored as 4-bit integers and scales (docs/quantization.md)."""
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0625}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of a decoder's weights and cache."""

    layer_weights: int
    head_weights: int
    attention_width: int
    """Values of all query heads, over all layers: each is multiplied by a key's and weights a value's."""
    kv_numbers: int
    """Values per token, over all layers."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Sizes:
        hidden, layers, heads = (
            config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        width = heads * (config.get("head_dim") or hidden // heads)
        kv_width = width * config["num_key_value_heads"] // heads
        weights = hidden * (2 * width + 2 * kv_width + 3 * config["intermediate_size"])
        return cls(layers * weights, hidden * config["vocab_size"], layers * width, 2 * layers * kv_width)


@dataclass(frozen=True, slots=True)
class Roofs:
    """A machine's rates, per second."""

    bytes: float
    operations: dict[str, float]
    """By dtype."""

    def tokens_per_second(self, workload: Workload, sizes: Sizes, dtype: str) -> float:
        columns = zip(*workload.prompts, strict=False)
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        own = [len(prompt) - shared for prompt in workload.prompts]
        prompt_tokens = shared + sum(own)
        attended = sum(n * (shared + n / 2) for n in own) + shared * shared / 2
        prompt = 2.0 * sizes.layer_weights * prompt_tokens + 4.0 * sizes.attention_width * attended
        contexts = [
            (count, len(tokens) + count / 2)
            for tokens, count in zip(workload.prompts, workload.max_tokens, strict=True)
        ]
        decoded = sum(count * context for count, context in contexts)
        weights = sizes.layer_weights + sizes.head_weights
        decode = 2.0 * weights * workload.num_output_tokens + 4.0 * sizes.attention_width * decoded
        read = max(workload.max_tokens) * weights * BYTES_PER_WEIGHT[dtype]
        read += decoded * sizes.kv_numbers * KV_BYTES[dtype]
        rate = self.operations[dtype]
        return workload.num_output_tokens / (prompt / rate + max(decode / rate, read / self.bytes))


def best_seconds(run: Callable[[], object], rounds: int) -> float:
    """Return the least time; the first run, which warms up, does not count."""
    found = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def measure_bandwidth(rounds: int) -> float:
    numbers = torch.ones(STREAMED_BYTES // 4)
    return STREAMED_BYTES / best_seconds(numbers.sum, rounds)


def measure_products(rounds: int) -> list[dict[str, Any]]:
    """Return operations per second of each side, shape and number of rows."""
    found = []
    for in_features, out_features in SHAPES:
        weight = torch.randn(out_features, in_features)
        bias = torch.zeros(-(-out_features // PANEL) * PANEL)
        for num_rows in ROWS:
            x = torch.randn(num_rows, in_features)
            for (dtype, side), run in _sides(x, weight, bias).items():
                seconds = best_seconds(run, rounds)
                rate = 2.0 * num_rows * in_features * out_features / seconds
                shape = {"in": in_features, "out": out_features, "rows": num_rows}
                found.append({"dtype": dtype, "side": side, **shape, "operations_per_second": rate})
    return found


def _sides(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> dict[tuple[str, str], Callable[[], object]]:
    width = len(weight)
    sides: dict[tuple[str, str], Callable[[], object]] = {
        ("fp32", "torch"): partial(torch.mm, x, weight.t()),
        ("fp32", "ours"): partial(fp32.multiply, x, weight_packing.pack(weight), bias),
        ("int8", "ours"): partial(int8.multiply, x, int8.pack(weight), bias, width),
    }
    if bf16.is_native():
        halves, reordered = x.bfloat16(), torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
        sides["bf16", "torch"] = partial(
            torch.ops.mkldnn._linear_pointwise, halves, reordered, None, "none", [], ""
        )
        sides["bf16", "ours"] = partial(bf16.multiply, x, bf16.pack(weight), bias, width)
    return sides


def measure(rounds: int) -> tuple[Roofs, list[dict[str, Any]]]:
    products = measure_products(rounds)
    operations: dict[str, float] = {}
    for item in products:
        operations[item["dtype"]] = max(operations.get(item["dtype"], 0.0), item["operations_per_second"])
    return Roofs(measure_bandwidth(rounds), operations), products


def shares(roofs: Roofs, model: str, throughput: Path | None) -> list[dict[str, Any]]:
    """Return each workload's upper bound by dtype, and the share that each engine of a file reached."""
    config = report.config_of(report.model_directory(model))
    measured = json.loads(throughput.read_text())["workloads"] if throughput is not None else {}
    found = []
    for name, build in WORKLOADS.items():
        workload = build(config["vocab_size"], 0, 1.0)
        for dtype in roofs.operations:
            roof = roofs.tokens_per_second(workload, Sizes.from_config(config), dtype)
            engines = measured.get(name, {}).get("engines", {})
            medians = {name: each["median"] for name, each in engines.items() if _dtype_of(name) == dtype}
            found.append({"workload": name, "dtype": dtype, "roof": roof, "medians": medians})
    return found


def _dtype_of(engine: str) -> str:
    """Return the dtype of a contender of `python -m benchmarks`: its name contains it unless it is fp32."""
    return engine.rpartition("-")[2] if "-" in engine else "fp32"


def print_tables(roofs: Roofs, products: list[dict[str, Any]], reached: list[dict[str, Any]]) -> None:
    console = report.console()
    console.print(f"memory: {roofs.bytes / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    shapes = [f"{i} x {o}, {r} rows" for i, o in SHAPES for r in ROWS]
    view = report.table("Products, GFLOP/s", ("dtype", "side"), shapes)
    for dtype, side in dict.fromkeys((item["dtype"], item["side"]) for item in products):
        mine = [item for item in products if (item["dtype"], item["side"]) == (dtype, side)]
        view.add_row(dtype, side, *(f"{item['operations_per_second'] / 1e9:.0f}" for item in mine))
    console.print(view)
    names = ("workload", "dtype", "roof", "engines")
    view = report.table("Roofs, output tokens/s, and the share reached", names, ())
    for item in reached:
        roof = item["roof"]
        engines = (f"{name} {rate:.0f} ({rate / roof:.0%})" for name, rate in item["medians"].items())
        view.add_row(item["workload"], item["dtype"], f"{roof:.0f}", ", ".join(engines))
    console.print(view)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--throughput", type=Path, help="a result of python -m benchmarks")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    file = report.Report("roofs", "what a CPU could do at most, per second", given)
    roofs, products = measure(given.rounds)
    reached = shares(roofs, given.model, given.throughput)
    print_tables(roofs, products, reached)
    file.write({"bytes_per_second": roofs.bytes, "products": products, "workloads": reached})
    print(f"written to {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
