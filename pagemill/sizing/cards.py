"""Memory bandwidth, compute rate and memory of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1 << 20
TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    name: str
    is_card: bool
    memory_bytes: int
    bytes_per_s: float
    flops: Mapping[str, float]
    """By dtype of the matmuls, dense."""
    read_share: float
    """Fraction of `bytes_per_s` that a decode step reaches."""
    compute_share: float
    """Fraction of `flops` that matmuls reach."""
    step_s: float
    """Overhead of a step in addition to memory access and computation: planning, launches, sampling."""
    job_s: float
    """Time of a job in queue, worker and tokenizer, if they use the device's time."""
    source: str

    def flops_of(self, dtype: str) -> float:
        return self.compute_share * (self.flops.get(dtype) or min(self.flops.values()))


_DATA_SHEET = "the maker's data sheet, without sparsity"


def _card(
    name: str, memory_mib: int, gb_per_s: float, half_tflops: float, single_tflops: float
) -> DeviceSpeed:
    half = half_tflops * TERA
    return DeviceSpeed(
        name=name,
        is_card=True,
        memory_bytes=memory_mib * MIB,
        bytes_per_s=gb_per_s * 1e9,
        flops={"bfloat16": half, "float16": half, "float32": single_tflops * TERA},
        # Not measured by this project: common values of serving engines.
        read_share=0.7,
        compute_share=0.5,
        step_s=0.002,
        job_s=0.0,
        source=_DATA_SHEET,
    )


CARDS: Mapping[str, DeviceSpeed] = {
    card.name: card
    for card in (
        _card("h200", 143_771, 4800, 989, 67),
        _card("h100", 81_559, 3350, 989, 67),
        _card("a100", 81_920, 2039, 312, 19.5),
        _card("a100-40", 40_960, 1555, 312, 19.5),
        _card("l40s", 46_068, 864, 362, 91.6),
        _card("l4", 23_034, 300, 121, 30.3),
        _card("4090", 24_564, 1008, 165, 82.6),
    )
}
"""Memory as nvidia-smi reports it; h100 and a100 (80 GB) are the SXM modules."""


def cpu(memory_bytes: int, bytes_per_s: float, flops: float, source: str) -> DeviceSpeed:
    """Describe a CPU by its memory bandwidth and its speed of fp32 matmuls."""
    return DeviceSpeed(
        name="cpu",
        is_card=False,
        memory_bytes=memory_bytes,
        bytes_per_s=bytes_per_s,
        flops={"float32": flops},
        read_share=1.0,
        # docs/performance.md: 180 of 245 GFLOP/s in prefill; decoding a row costs the same.
        compute_share=0.7,
        step_s=0.001,
        job_s=0.0012,  # 2.4 ms of two cores per job, including server and client
        source=source,
    )
