"""The figures as tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table

from benchmarks.gateway.bare import GOAL
from benchmarks.gateway.processes import VLLM_DTYPE
from benchmarks.gateway.rounds import Figures

VLLM_GOAL = 2.0
"""The gateway's tokens per second over those of vLLM's server, all at once."""


def ways(rows: Sequence[Figures], arguments: argparse.Namespace) -> Table:
    table = _table(
        f"{arguments.model}, {arguments.requests} requests of {arguments.max_tokens} tokens: ms per request",
        ("way", "load"),
        ("tok/s", "mean", "p50", "p99", "first token", "over direct", "of bare engine", "processor"),
    )
    direct = {row.load: row.mean_ms for row in rows if row.way == "direct"}
    for row in rows:
        share = row.share_of_bare
        table.add_row(
            row.way,
            row.load,
            f"{row.tokens_per_s:.0f}",
            f"{row.mean_ms:.2f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.first_token_ms:.2f}",
            f"{row.mean_ms - direct[row.load]:+.2f}",
            "" if share is None else f"{share:.1%}" + (f" (goal {GOAL:.0%})" if row.is_streamed else ""),
            _processor(row),
        )
    for alone, load in {row.load: (row.bare, row.load) for row in rows if row.bare is not None}.values():
        assert alone is not None
        table.add_row(
            "bare engine", load, f"{alone.tokens_per_s:.0f}", *[""] * 5, "100%", f"engine {alone.cpu_ms:.2f}"
        )
    return table


def comparison(rows: Sequence[Figures], arguments: argparse.Namespace) -> Table:
    table = _table(
        f"{arguments.model}, {arguments.requests} requests of {arguments.prompt_tokens} random tokens in and "
        f"{arguments.max_tokens} out, streamed; vLLM's server in {VLLM_DTYPE}; ms",
        ("server", "load"),
        ("tok/s", "over vLLM", "first token", "p99", "per token", "request", "processor a request"),
    )
    others = {row.load: row.tokens_per_s for row in rows if row.way != "gateway"}
    for row in rows:
        over = f"{row.tokens_per_s / others[row.load]:.2f} x" if row.way == "gateway" else ""
        if over and row.load.endswith("at once"):
            over += f" (goal {VLLM_GOAL:g} x)"
        table.add_row(
            row.way,
            row.load,
            f"{row.tokens_per_s:.0f}",
            over,
            f"{row.first_token_ms:.0f}",
            f"{row.first_token_p99_ms:.0f}",
            f"{row.per_token_ms or 0.0:.1f}",
            f"{row.mean_ms:.0f}",
            _processor(row),
        )
    return table


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table


def _processor(row: Figures) -> str:
    return ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in row.cpu_ms.items())
