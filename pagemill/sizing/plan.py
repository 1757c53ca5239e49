"""The arithmetic of a plan: blocks, rows, a worker's jobs per second, workers, Redis.

A step reads every weight once and computes every row, so its time is a + b * rows (docs/performance.md, "Throughput
model"); a job uses its prompt's share of steps once, and a step's time divided by the rows for each output token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagemill.engine.config import MAX_KV_BLOCKS, divide_states
from pagemill.sizing.cards import DeviceSpeed
from pagemill.sizing.redis_cost import SCRIPT_S, SERVER_BYTES, JobBytes, job_bytes, scripts_per_job

if TYPE_CHECKING:
    from pagemill.engine.figures import ModelFigures

BUSY = 0.8
"""The fraction of the capacity of workers and a server's core that a plan assumes."""
GPU_UTILIZATION = 0.9
CUDA_BYTES = 1 << 30
"""A context, cuBLAS' workspace and a step's activations."""
WATERMARK = 0.01
_ROUNDS = 200


class PlanError(ValueError):
    """No plan: the model or the load does not fit; the message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    prompt_tokens: int
    output_tokens: int
    jobs_per_s: float
    shared_tokens: int = 0
    """Prompt tokens of the prefix shared by all jobs, computed once."""
    waiting_jobs: int = 0
    """The longest queue."""
    kept_jobs: float = 0.0
    """Ended jobs whose results are still stored."""
    bytes_per_token: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    max_num_seqs: int
    kv_bytes: int | None = None
    """Bytes for the KV pool; None: the device's remaining memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Per worker: blocks to service_s. For the load: workers and Redis."""

    kv_bytes: int
    kv_blocks: int
    blocks_per_job: int
    rows: int
    """Concurrent jobs, by blocks and by max_num_seqs."""
    rows_limited_by: str
    cached_states: int
    """Recurrent states at the ends of cached prefixes."""
    step_s: float
    """Time of a decode step with all rows."""
    jobs_per_s: float
    """Jobs per second with all rows always in use."""
    output_tokens_per_s: float
    workers: int
    busy_rows: float
    """Rows in use per worker, on average, at the load."""
    service_s: float
    """A job's time in the engine at the load."""
    redis_bytes: int
    bytes: JobBytes
    redis_scripts_per_s: float
    redis_cores: float


def make_plan(model: ModelFigures, device: DeviceSpeed, load: Load, limits: WorkerLimits) -> Plan:
    """Plan for one device per worker. Raises PlanError."""
    _check(model, load)
    kv_bytes = _kv_bytes(model, device, limits)
    per_job = model.blocks_of(load.prompt_tokens + load.output_tokens - 1)
    states, cached_states = _states(model, kv_bytes, limits)
    kv_bytes -= (states + cached_states) * model.state_bytes
    blocks = min(
        MAX_KV_BLOCKS, kv_bytes // model.block_bytes if model.block_bytes else 1 + 2 * states * per_job
    )
    shared = min(per_job - 1, load.shared_tokens // model.block_size * len(model.windows))
    usable = int((blocks - 1) * (1 - WATERMARK)) - shared
    by_blocks = usable // (per_job - shared) if usable > 0 else 0
    if by_blocks < 1:
        free, weights = kv_bytes / 2**30, model.weight_bytes / 2**30
        raise PlanError(
            f"{device.name} has {free:.2f} GiB for KV blocks next to {weights:.1f} GiB of weights, and a job needs "
            f"{per_job} blocks of {model.block_bytes / 2**20:.2f} MiB: take a larger device, fewer tokens, a smaller "
            "--dtype, a quantized checkpoint, or several GPUs (tensor parallelism is not planned)"
        )
    rows = min(states, by_blocks)
    times = _Times.from_figures(model, device, load)
    jobs_per_s = 1 / times.job_s(rows)
    workers = max(1, math.ceil(load.jobs_per_s / (BUSY * jobs_per_s)))
    busy_rows, service_s = times.steady_state(load.jobs_per_s / workers, rows)
    sizes = job_bytes(load.prompt_tokens, load.output_tokens, load.bytes_per_token)
    running = busy_rows * workers
    scripts = load.jobs_per_s * scripts_per_job(service_s, load.output_tokens, busy_rows)
    return Plan(
        kv_bytes=kv_bytes,
        kv_blocks=blocks,
        blocks_per_job=per_job,
        rows=rows,
        rows_limited_by=_limit(rows, states, limits),
        cached_states=cached_states,
        step_s=times.step_s(rows),
        jobs_per_s=jobs_per_s,
        output_tokens_per_s=jobs_per_s * load.output_tokens,
        workers=workers,
        busy_rows=busy_rows,
        service_s=service_s,
        redis_bytes=round(
            SERVER_BYTES
            + load.waiting_jobs * sizes.waiting
            + running * sizes.running
            + load.kept_jobs * sizes.ended
        ),
        bytes=sizes,
        redis_scripts_per_s=scripts,
        redis_cores=scripts * SCRIPT_S,
    )


def _check(model: ModelFigures, load: Load) -> None:
    if (longest := load.prompt_tokens + load.output_tokens) > model.context_length:
        raise PlanError(
            f"prompt and output are {longest} tokens, and {model.name} takes {model.context_length}: "
            "fewer --prompt-tokens or --output-tokens"
        )
    if load.shared_tokens >= load.prompt_tokens:
        raise PlanError(
            f"--shared-tokens {load.shared_tokens}: a part of the {load.prompt_tokens} prompt tokens"
        )


def _states(model: ModelFigures, kv_bytes: int, limits: WorkerLimits) -> tuple[int, int]:
    """Return the sequences that a worker has rows and states for, and its cached states. Raises PlanError."""
    if not model.state_bytes:
        return limits.max_num_seqs, 0
    num_states = kv_bytes // model.state_bytes
    states, cached = divide_states(num_states, limits.max_num_seqs, None, has_blocks=model.block_bytes > 0)
    if states < 1:
        raise PlanError(
            f"{kv_bytes / 2**30:.2f} GiB next to the weights cannot hold a sequence's recurrent state of "
            f"{model.state_bytes / 2**20:.2f} MiB and its KV blocks: take a larger device"
        )
    return states, cached


def _limit(rows: int, states: int, limits: WorkerLimits) -> str:
    if rows == limits.max_num_seqs:
        return "max_num_seqs"
    return "recurrent states" if rows == states else "KV blocks"


def _kv_bytes(model: ModelFigures, device: DeviceSpeed, limits: WorkerLimits) -> int:
    if limits.kv_bytes is not None:
        return limits.kv_bytes
    return max(0, int(GPU_UTILIZATION * device.memory_bytes) - model.weight_bytes - CUDA_BYTES)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds on a device."""

    fixed_s: float
    """Time of a step: its weights, and overhead."""
    row_s: float
    """Time of a row in a decode step."""
    prompt_s: float
    """Time of a job's prompt and, on the CPU, its handling."""
    output_tokens: int

    @classmethod
    def from_figures(cls, model: ModelFigures, device: DeviceSpeed, load: Load) -> _Times:
        flops, read = device.flops_of(model.dtype), device.read_share * device.bytes_per_s
        own = load.prompt_tokens - load.shared_tokens
        context = load.prompt_tokens + load.output_tokens / 2
        attended = own * (load.shared_tokens + own / 2)  # pairs of a token and one before it
        products = (
            2 * (own * model.layer_parameters + model.head_parameters) + 4 * attended * model.attention_width
        )
        per_row = 2 * (model.layer_parameters + model.head_parameters) + 4 * context * model.attention_width
        kv_read = model.kv_bytes_read(context)
        return cls(
            fixed_s=device.step_s + model.read_bytes / read,
            row_s=per_row / flops + kv_read / read,
            prompt_s=device.job_s + products / flops,
            output_tokens=load.output_tokens,
        )

    def step_s(self, rows: float) -> float:
        return self.fixed_s + rows * self.row_s

    def job_s(self, rows: float) -> float:
        """A job's share of the device's time with this number of rows."""
        return self.prompt_s + self.output_tokens * self.step_s(rows) / rows

    def steady_state(self, jobs_per_s: float, most_rows: int) -> tuple[float, float]:
        """Return the rows in use at a rate, and a job's time in the engine (Little's law).

        Prompts reduce the time available for decode steps.
        """
        left = max(1e-3, 1 - jobs_per_s * self.prompt_s)
        rows = 1.0
        for _ in range(_ROUNDS):
            service_s = self.prompt_s + self.output_tokens * self.step_s(max(1.0, rows)) / left
            rows = min(float(most_rows), jobs_per_s * service_s)
        return rows, service_s
