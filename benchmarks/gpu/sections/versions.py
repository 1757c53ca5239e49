"""Versions and hardware: figures mean nothing without them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.section import Bench, Row

NEEDED = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17)}
_FREE_DISK_BYTES = 1 << 30
_FREE_MEMORY_SHARE = 0.9
"""Of the device's memory: another program on the card would spoil every figure."""


def run(bench: Bench) -> Iterator[Row]:
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
    asked = subprocess.run(command, capture_output=True, text=True, check=False) if _has_smi() else None
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


def _has_smi() -> bool:
    return shutil.which("nvidia-smi") is not None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
