"""Whose matmuls are faster on this CPU, Pagemill's or oneDNN's: a measurement of at most 2 s, kept on disk.

One choice applies to a complete model, because a compiled decoder layer (`engine.layers.decoder_layer`) needs
Pagemill's kernels in all its matmuls.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from pagemill.engine.layers.linear import Matmul

logger = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping")
ROWS = (1, 4, 16, 64, 256, 1024)
BUDGET_S = 2.0
"""CPU time of the measuring thread."""
MARGIN = 1.5
"""oneDNN's matmuls must be faster by this factor, because they exclude compiled layers: on a CPU where both took about
the same time, SmolLM2 took 1.1 times (long prompts) to 2.2 times (one sequence) as long with oneDNN's."""
MAX_ROUNDS = 5
MIN_WEIGHTS = 2**23
"""Smaller models use Pagemill's kernels, without a measurement."""
_MAX_WEIGHTS = 2**23
"""Measured weights of a layer: more than caches hold. Further outputs take time in proportion."""
_MEASURED_VENDORS = ("AuthenticAMD",)
"""On these CPUs with AVX2 or AVX-512, Pagemill's kernels were at least as fast in complete models."""

Shapes = Mapping[tuple[int, int], int]
"""The number of layers by (in_features, out_features)."""
Products = Mapping[Matmul, Callable[[torch.Tensor], nn.Module]]
"""Makers of both matmuls from fp32 weights [out_features, in_features]."""


def decoder_shapes(module: nn.Module) -> Shapes:
    """Return the shapes of a model's linear layers, without those outside of its repeated layers."""
    return Counter(
        (layer.in_features, layer.out_features)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and any(part.isdigit() for part in name.split("."))
    )


def cpu_name() -> str:
    """Return the vendor and model of this CPU as Linux reports them, elsewhere the platform's name."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    return " ".join(line.partition(":")[2].strip() for line in lines[:8] if line.startswith(_CPU_FIELDS))


def is_measured(cpu: str) -> bool:
    """Return True if Pagemill's matmuls are known to be the right choice on this CPU."""
    return cpu.startswith(_MEASURED_VENDORS)


def choose(shapes: Shapes, products: Products, kind: str, directory: Path) -> Matmul:
    """Return the faster matmul for these layers, from `directory` or measured and written there.

    Args:
        kind: everything else on which times depend: CPU, dtype, versions, number of threads.
        directory: the directory of compiled kernels, which changes with their sources.
    """
    if sum(count * math.prod(shape) for shape, count in shapes.items()) < MIN_WEIGHTS:
        return "own"
    key = hashlib.sha256(f"{sorted(shapes)} {kind}".encode()).hexdigest()[:16]
    file = directory / f"matmul-{key}.json"
    if (speedup := _read(file)) is None:
        if (speedup := measure(shapes, products)) is None:
            logger.info("matmuls: own; the CPU is too busy to measure oneDNN's")
            return "own"
        _write(file, speedup)
    choice: Matmul = "onednn" if speedup >= MARGIN else "own"
    logger.info("matmuls: %s; oneDNN's are %.2f times as fast as Pagemill's", choice, speedup)
    return choice


def measure(
    shapes: Shapes, products: Products, clock: Callable[[], float] = time.thread_time
) -> float | None:
    """Return how many times as fast oneDNN's matmuls are, as the geometric mean over `ROWS`.

    Both are timed alternately, and the fastest of up to `MAX_ROUNDS` rounds counts. None: one round took more than the
    budget, which excludes compilation.
    """
    made: dict[tuple[tuple[int, int], Matmul], nn.Module] = {}
    best: dict[tuple[int, tuple[int, int], Matmul], float] = {}
    with torch.inference_mode():
        for shape in shapes:
            weight = _weight(_measured_outputs(shape), shape[0])
            for name, make in products.items():
                made[shape, name] = make(weight)
                made[shape, name](torch.ones(1, shape[0]))
        end = clock() + BUDGET_S
        calls = itertools.product(range(MAX_ROUNDS), ROWS, made.items())
        for _, num_rows, ((shape, name), product) in calls:
            rows = torch.ones(num_rows, shape[0])
            began = clock()
            product(rows)
            ended = clock()
            key = (num_rows, shape, name)
            best[key] = min(ended - began, best.get(key, math.inf))
            if ended > end:
                break
    if len(best) < len(ROWS) * len(made):
        return None

    def total(num_rows: int, name: Matmul) -> float:
        return sum(
            count * best[num_rows, shape, name] * shape[1] / _measured_outputs(shape)
            for shape, count in shapes.items()
        )

    ratios = [total(num_rows, "own") / max(total(num_rows, "onednn"), 1e-9) for num_rows in ROWS]
    return statistics.geometric_mean(max(ratio, 1e-9) for ratio in ratios)


def _measured_outputs(shape: tuple[int, int]) -> int:
    return min(shape[1], max(1, _MAX_WEIGHTS // shape[0]))


def _weight(outputs: int, inputs: int) -> torch.Tensor:
    """Return fp32 weights with the precision of most checkpoints: Pagemill's kernels store fewer bits if they can."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def _read(file: Path) -> float | None:
    try:
        value = json.loads(file.read_text())["speedup"]
        return float(value) if 0 < float(value) < math.inf else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, speedup: float) -> None:
    partial = file.with_suffix(".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"speedup": speedup}))
        partial.replace(file)
    except OSError as error:
        logger.info("the choice of matmuls is not kept: %s", error)
