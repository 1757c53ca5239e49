"""Options and output of `pagemill doctor --plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, get_type_hints

import typer

from pagemill.cli.terminal.checked import YEAR_S, between, checked
from pagemill.engine.config import EngineConfig
from pagemill.sizing.cards import CARDS

if TYPE_CHECKING:
    from pagemill.sizing.answer import Answer

MAX_TOKENS = 2**24
_HINTS = get_type_hints(EngineConfig, include_extras=True)
FULL = 0.75
"""The share of maxmemory that a plan fills: running jobs need room to end."""
Tokens = Annotated[int | None, typer.Option(min=1, max=MAX_TOKENS, help="Of a job, on average.")]
Shared = Annotated[int, typer.Option(min=0, max=MAX_TOKENS, help="Of the prompt, that all jobs begin with.")]
Rate = Annotated[float | None, typer.Option(callback=between(1e-6, 1e9), help="Jobs per second that arrive.")]
Rows = Annotated[int | None, typer.Option(min=1, max=10**12, help="Jobs of a batch, instead of a rate.")]
Deadline = Annotated[
    float | None,
    typer.Option(callback=between(1e-3, YEAR_S), help="Seconds until the last of the rows has ended."),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        callback=checked(Literal["cpu", *CARDS]),
        help="cpu, h200, h100, a100, a100-40, l40s, l4 or 4090.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(callback=checked(_HINTS["dtype"]), help="auto, float32, float16 or bfloat16."),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype", callback=checked(_HINTS["kv_cache_dtype"]), help="auto, bfloat16, int8 or fp8."
    ),
]
Retention = Annotated[
    float, typer.Option(callback=between(0.0, YEAR_S), help="Seconds that results of a rate are kept.")
]
TokenBytes = Annotated[
    float, typer.Option("--bytes-per-token", callback=between(0.1, 100.0), help="Of text, in Redis.")
]
WeightBits = Annotated[
    float | None, typer.Option(callback=between(0.5, 64.0), help="Of a weight. Default: as config.json says.")
]
MaxRows = Annotated[int | None, typer.Option("--max-num-seqs", min=1, max=2**16, help="Rows of a worker.")]
Bandwidth = Annotated[
    float | None, typer.Option("--cpu-gb-per-s", callback=between(0.01, 1e5), help="Default: measured.")
]
Compute = Annotated[
    float | None, typer.Option("--cpu-gflops", callback=between(0.1, 1e7), help="In fp32. Default: measured.")
]


def print_answer(answer: Answer, as_json: bool) -> None:
    """Print JSON, or tab-separated lines: what, how much, why; then the assumptions."""
    if as_json:
        typer.echo(json.dumps(answer.document()))
        return
    for line in _lines(answer):
        typer.echo("\t".join(line))
    for assumption in answer.assumptions:
        typer.echo(f"assumed\t{assumption}")


def _lines(answer: Answer) -> Iterator[tuple[str, str, str]]:
    model, plan, load = answer.model, answer.plan, answer.load
    billions = model.parameters / 1e9
    yield (
        "model",
        model.name,
        f"{billions:.2f} billion numbers, weights {_size(model.weight_bytes)} on {answer.device.name}",
    )
    yield (
        "KV blocks",
        f"{plan.kv_blocks:,}",
        f"of {model.block_size} tokens and {_size(model.block_bytes)}: {_size(plan.kv_bytes)}"
        + (
            ""
            if model.expanded_block_bytes is None
            else f"; latents, instead of {_size(model.expanded_block_bytes)} of keys and values"
        ),
    )
    yield (
        "rows",
        f"{plan.rows:,}",
        f"jobs at once, of {plan.blocks_per_job} blocks each; {plan.rows_limited_by} set the limit",
    )
    yield (
        "a worker",
        f"{plan.jobs_per_s:,.2f} jobs/s",
        f"{plan.output_tokens_per_s:,.0f} output tokens/s, a step of all rows takes {plan.step_s * 1e3:,.1f} ms",
    )
    yield "workers", f"{plan.workers:,}", f"for {load.jobs_per_s:,.2f} jobs/s"
    yield (
        "a job",
        f"{plan.service_s:,.1f} s",
        f"in the engine, with {plan.busy_rows:,.1f} rows of a worker taken on average",
    )
    yield (
        "Redis memory",
        _size(plan.redis_bytes),
        f"a job takes {plan.bytes.waiting:,} bytes while it waits, {plan.bytes.ended:,} once it has ended; "
        f"set maxmemory to {_size(plan.redis_bytes / FULL)} or more",
    )
    yield (
        "Redis CPU",
        f"{plan.redis_cores:.2f} cores",
        f"{plan.redis_scripts_per_s:,.0f} scripts/s"
        + (
            ""
            if plan.redis_cores < 0.8
            else ": more than one server carries; spread the jobs over several queues"
        ),
    )


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"
