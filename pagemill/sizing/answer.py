"""A plan with everything it rests on: the model's sizes, the device's speed, the load, and the assumptions in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pagemill.engine.config import EngineConfig
from pagemill.sizing.cards import CARDS, DeviceSpeed, cpu
from pagemill.sizing.plan import BUSY, Load, Plan, PlanError, WorkerLimits, make_plan

if TYPE_CHECKING:
    from pagemill.engine.figures import ModelFigures

BACKLOG_S = 600.0
"""Of arrivals, that may wait at once: workers that are away, or a burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. A rate of arrivals, or rows and a deadline."""

    config: EngineConfig
    device: str
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    rate: float | None = None
    """Jobs per second."""
    rows: int | None = None
    deadline_s: float | None = None
    retention_s: float = 86_400.0
    """Of results, of jobs that arrive at a rate. Those of rows are kept together, for a week."""
    bytes_per_token: float = 4.0
    weight_bits: float | None = None
    cpu_bytes_per_s: float | None = None
    cpu_flops: float | None = None

    def load(self) -> Load:
        """Raises PlanError."""
        if (self.rate is None) == (self.rows is None):
            raise PlanError("say what comes: --rate JOBS_PER_SECOND, or --rows N with --deadline SECONDS")
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
    """Look the model up, measure the CPU if it is asked about, and plan.

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
    speed, flops = question.cpu_bytes_per_s, question.cpu_flops
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
        f"up to {BACKLOG_S:.0f} s of arrivals wait at once, results stay {question.retention_s / 3600:g} h"
        if question.rate is not None
        else "all rows wait at once, and all results are kept"
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
