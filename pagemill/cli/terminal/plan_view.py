"""Options and output of `pagemill doctor --plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import typer

from pagemill.cli.terminal.checked import checked
from pagemill.cli.terminal.setting_flags import option, options, settings_of
from pagemill.engine.config import EngineConfig
from pagemill.sizing.answer import Answer, Question
from pagemill.sizing.cards import CARDS

_QUESTION = settings_of(Question, without={"config"})
QUESTION = options(
    _QUESTION,
    {
        "device": {"metavar": "NAME", "callback": checked(Literal["cpu", *CARDS])},
        "deadline_s": {"flag": "--deadline"},
        "retention_s": {"flag": "--retention"},
    },
    first=list(_QUESTION),
    is_checked=True,
)
"""The flags of a plan."""
ENGINE = {
    name: option(setting, is_checked=True)
    for name, setting in settings_of(EngineConfig).items()
    if name in ("dtype", "kv_cache_dtype", "max_num_seqs")
}
"""The engine's settings that a plan depends on."""
FULL = 0.75
"""The share of maxmemory that a plan fills: running jobs need room to end."""


def print_answer(answer: Answer, as_json: bool) -> None:
    """Print JSON, or tab-separated lines (item, amount, reason), followed by the assumptions."""
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
    if model.state_bytes:
        yield (
            "recurrent state",
            _size(model.state_bytes),
            f"per sequence, one for each row and {plan.cached_states:,} of cached prefixes",
        )
    yield (
        "rows",
        f"{plan.rows:,}",
        f"concurrent jobs, of {plan.blocks_per_job} blocks each; {plan.rows_limited_by} set the limit",
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
