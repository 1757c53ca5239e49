"""What the kernels do on the GPU at hand: are they right, and how near do they come to the machine's limits?

    python -m benchmarks.gpu [--section NAME ...] [--out DIR]

Runs every section in under ten minutes on an H200, needs nothing from outside, prints a table per section and
rewrites DIR/gpu.json after each, so that an interrupted run keeps what it has. Exit code 1: a kernel is wrong;
2: there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_attention
from benchmarks.gpu_timing import median_seconds

Row = dict[str, Any]

_CUDA = torch.device("cuda")


def machine() -> list[Row]:
    """What ran where. Ask for this section with every other: figures mean nothing without it."""
    properties = torch.cuda.get_device_properties(_CUDA)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    facts = {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver.stdout.strip(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    facts |= {name: _version(name) for name in ("torch", "triton", "transformers")}
    return [{"fact": fact, "value": value} for fact, value in facts.items()]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def ceilings() -> list[Row]:
    """The two rates that everything else is held against: a large copy (bytes read plus written), a product."""
    source = torch.empty(2**30, dtype=torch.float32, device=_CUDA).normal_()
    target = torch.empty_like(source)
    copy_seconds = median_seconds(lambda: target.copy_(source))
    left = torch.empty(8192, 8192, dtype=torch.bfloat16, device=_CUDA).normal_()
    right = torch.empty_like(left).normal_()
    product_seconds = median_seconds(lambda: torch.mm(left, right))
    return [
        {"ceiling": "copy_gb_per_s", "value": round(2 * source.nbytes / copy_seconds / 1e9)},
        {"ceiling": "bf16_tflop_per_s", "value": round(2 * 8192**3 / product_seconds / 1e12)},
    ]


SECTIONS: dict[str, Callable[[dict[str, list[Row]]], list[Row]]] = {
    "machine": lambda _: machine(),
    "ceilings": lambda _: ceilings(),
    "correctness": lambda _: gpu_attention.correctness(_CUDA),
    "decode": lambda done: gpu_attention.decode(_CUDA, median_seconds, _ceiling(done, "copy_gb_per_s")),
    "prefill": lambda done: gpu_attention.prefill(_CUDA, median_seconds, _ceiling(done, "bf16_tflop_per_s")),
    "tiles": lambda _: gpu_attention.tiles(_CUDA, median_seconds),
}


def _ceiling(done: dict[str, list[Row]], name: str) -> float | None:
    return next((row["value"] for row in done.get("ceilings", ()) if row.get("ceiling") == name), None)


def print_table(title: str, rows: list[Row]) -> None:
    """Columns are the first row's keys."""
    print(f"\n{title}")
    if not rows:
        return
    columns = list(rows[0])
    cells = [columns] + [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for line in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="default: all, in order")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2

    done: dict[str, list[Row]] = {}
    failed = False
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.section or list(SECTIONS):
        started = time.perf_counter()
        try:
            rows = SECTIONS[name](done)
        except Exception:
            # The device is lent by the minute: the other sections still have something to say.
            traceback.print_exc()
            rows = [{"error": traceback.format_exc().strip().splitlines()[-1]}]
        failed = failed or any(row.get("ok") is False or "error" in row for row in rows)
        done[name] = rows
        (options.out / "gpu.json").write_text(json.dumps(done, indent=1) + "\n")
        print_table(f"{name} ({time.perf_counter() - started:.0f} s)", rows)
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
