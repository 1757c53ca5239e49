"""The first sections of every part: versions, hardware, and the reference rates."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.section import Bench, Row, Skipped

NEEDED = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17)}
_FREE_DISK_BYTES = 1 << 30
_FREE_MEMORY_SHARE = 0.9
"""Required share of the device's free memory: another program on the GPU would distort every result."""


def run_versions(bench: Bench) -> Iterator[Row]:
    for name, least in NEEDED.items():
        version = _version(name)
        yield Row(case=name, ok=_numbers(version) >= least, facts={"version": version, "least": least})
    yield Row(case="python", facts={"version": platform.python_version()})
    free = shutil.disk_usage(".").free
    yield Row(case="disk", ok=free >= _FREE_DISK_BYTES, facts={"free_bytes": free})
    if bench.device.type == "cuda":
        yield _card(bench.device)


def _card(device: torch.device) -> Row:
    properties = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    has_smi = shutil.which(command[0]) is not None
    asked = subprocess.run(command, capture_output=True, text=True, check=False) if has_smi else None
    free, total = torch.cuda.mem_get_info(device)
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "driver_and_clocks": asked.stdout.strip() if asked else "no nvidia-smi",
        "cuda": torch.version.cuda,
    }
    return Row(case="card", ok=properties.major >= 8 and free >= _FREE_MEMORY_SHARE * total, facts=facts)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def run_ceilings(bench: Bench) -> Iterator[Row]:
    """The reference rates for all results: a large copy, and large matmuls of random values."""
    elements, side = (2**10, 32) if bench.is_tiny else (2**30, 8192)
    source = torch.empty(elements, dtype=torch.float32, device=bench.device).normal_()
    target = torch.empty_like(source)
    # Uses a kernel: in a graph, `copy_` is the driver's copy, which reached 2.7 TB/s on an H200; kernels read
    # 4.4.
    seconds = bench.measure(lambda: torch.neg(source, out=target))
    yield Row(case="copy", measured=2 * source.nbytes / seconds, unit="B/s")
    left, right = (torch.randn(side, side, device=bench.device).bfloat16() for _ in range(2))
    seconds = bench.measure(lambda: torch.mm(left, right))
    yield Row(case="bf16 product", measured=2 * side**3 / seconds, unit="FLOP/s")
    if bench.device.type == "cuda" and torch.cuda.get_device_capability(bench.device) < (8, 9):
        raise Skipped("fp8 products need compute capability 8.9")
    seconds = bench.measure(_fp8_product(left, right))
    yield Row(case="fp8 product", measured=2 * side**3 / seconds, unit="FLOP/s")


def _fp8_product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Scaled by row and by column, like fp8 weights."""
    fp8 = torch.float8_e4m3fn
    a, b = left.to(fp8), right.t().contiguous().to(fp8).t()
    scale_a, scale_b = (torch.ones(shape, device=left.device) for shape in ((len(left), 1), (1, len(left))))
    return lambda: torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
