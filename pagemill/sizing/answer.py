"""A plan with its inputs: the model's sizes, the device's speed, the load, and the assumptions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pagemill.engine.config import EngineConfig
from pagemill.sizing.cards import CARDS, DeviceSpeed, cpu
from pagemill.sizing.plan import BUSY, Load, Plan, PlanError, WorkerLimits, make_plan

if TYPE_CHECKING:
    from pagemill.engine.figures import ModelFigures

MAX_TOKENS = 2**24
YEAR_S = 366 * 86_400.0
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
BACKLOG_S = 600.0
"""Seconds of arrivals that can wait together: workers that are unavailable, or a burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The planned load: an arrival rate, or rows and a deadline."""

    config: EngineConfig
    device: str = "cpu"
    """cpu, h200, h100, a100, a100-40, l40s, l4 or 4090."""
    prompt_tokens: Tokens
    """Average length of a job's prompt in tokens."""
    output_tokens: Tokens
    """Average length of a job's output in tokens."""
    shared_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Number of prompt tokens that all jobs share."""
    rate: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    """Arriving jobs per second."""
    rows: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Number of jobs of a batch, instead of a rate."""
    deadline_s: Annotated[float, Field(ge=1e-3, le=YEAR_S)] | None = None
    """Seconds until all rows have finished."""
    weight_bits: Annotated[float, Field(ge=0.5, le=64.0)] | None = None
    """Bits per weight. Default: as in config.json."""
    retention_s: Annotated[float, Field(ge=0.0, le=YEAR_S)] = 86_400.0
    """Seconds that results of a rate are kept; those of rows are kept together for a week."""
    bytes_per_token: Annotated[float, Field(ge=0.1, le=100.0)] = 4.0
    """Bytes of text per token in Redis."""
    cpu_gb_per_s: Annotated[float, Field(ge=0.01, le=1e5)] | None = None
    """Memory bandwidth of the CPU. Default: measured."""
    cpu_gflops: Annotated[float, Field(ge=0.1, le=1e7)] | None = None
    """Speed of the CPU in fp32. Default: measured."""

    def load(self) -> Load:
        """Raises PlanError."""
        if (self.rate is None) == (self.rows is None):
            raise PlanError("--rate JOBS_PER_SECOND, or --rows N with --deadline SECONDS, is required")
        common = Load(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            shared_tokens=self.shared_tokens,
            bytes_per_token=self.bytes_per_token,
            jobs_per_s=0.0,
        )
        if self.rate is not None:
            waiting, kept = round(self.rate * BACKLOG_S), self.rate * self.retention_s
            return replace(common, jobs_per_s=self.rate, waiting_jobs=waiting, kept_jobs=kept)
        assert self.rows is not None
        if self.deadline_s is None:
            raise PlanError("--rows needs --deadline SECONDS: by then all of them have ended")
        return replace(
            common, jobs_per_s=self.rows / self.deadline_s, waiting_jobs=self.rows, kept_jobs=self.rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    model: ModelFigures
    device: DeviceSpeed
    load: Load
    plan: Plan
    assumptions: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        device = asdict(self.device) | {"flops": dict(self.device.flops)}
        return {
            "model": asdict(self.model),
            "device": device,
            "load": asdict(self.load),
            "plan": asdict(self.plan),
            "assumptions": list(self.assumptions),
        }


def answer(question: Question) -> Answer:
    """Look the model up, measure the CPU if it is the device, and plan.

    Raises PlanError, and `pagemill.engine.errors.EngineError` for the model.
    """
    load = question.load()
    from pagemill.engine.devices.cuda import CudaBackend
    from pagemill.engine.figures import read_figures

    config, is_card = question.config, question.device != "cpu"
    model = read_figures(config, on_card=is_card, weight_bits=question.weight_bits)
    if is_card:
        device, kv_bytes = CARDS[question.device], config.kv_cache_memory_bytes
        rows = config.max_num_seqs or CudaBackend.step_defaults.max_num_seqs
    else:
        device, kv_bytes, rows = _this_cpu(question)
    if config.num_kv_blocks is not None:
        kv_bytes = config.num_kv_blocks * model.block_bytes
    plan = make_plan(model, device, load, WorkerLimits(max_num_seqs=rows, kv_bytes=kv_bytes))
    return Answer(
        model=model,
        device=device,
        load=load,
        plan=plan,
        assumptions=_assumptions(question, model, device),
    )


def _this_cpu(question: Question) -> tuple[DeviceSpeed, int, int]:
    from pagemill.engine.devices.cpu import CpuBackend
    from pagemill.engine.devices.cpu_speed import measure_cpu

    backend, config = CpuBackend(), question.config
    backend.tune_process(config.num_threads)
    speed, flops = (value and value * 1e9 for value in (question.cpu_gb_per_s, question.cpu_gflops))
    source = "as given"
    if speed is None or flops is None:
        measured = measure_cpu()
        speed, flops = speed or measured.bytes_per_s, flops or measured.flops
        source = f"measured now with {measured.threads} threads; rounds differed by a factor of {measured.spread:.1f}"
    kv_bytes = config.kv_cache_memory_bytes or backend.free_bytes(config)
    rows = config.max_num_seqs or backend.step_defaults.max_num_seqs
    return cpu(backend.total_bytes(), speed, flops, source), kv_bytes, rows


def _assumptions(question: Question, model: ModelFigures, device: DeviceSpeed) -> tuple[str, ...]:
    flops = device.flops.get(model.dtype) or min(device.flops.values())
    waiting = (
        f"up to {BACKLOG_S:.0f} s of arrivals wait together, results stay {question.retention_s / 3600:g} h"
        if question.rate is not None
        else "all rows wait together, and all results are kept"
    )
    return (
        f"{device.name}: {device.bytes_per_s / 1e9:,.0f} GB/s and {flops / 1e12:,.2f} TFLOP/s ({device.source}), of "
        f"which {device.read_share:.0%} and {device.compute_share:.0%} are reached; {device.step_s * 1e3:g} ms a step",
        f"weights of {model.weight_bits:.1f} bits, products in {model.dtype}, KV cache in {model.kv_dtype}",
        f"no tokens from the prefix cache but {question.shared_tokens} shared ones, no preemptions, no speculation",
        f"workers and the server's core are busy {BUSY:.0%} of the time",
        f"{waiting}; {question.bytes_per_token:g} bytes of text per token",
        "one device per worker; the server's bytes are those of Valkey 9, its scripts 0.2 ms of a core each",
    )
