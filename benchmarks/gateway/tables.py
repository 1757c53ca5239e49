"""The results as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table

from benchmarks import report
from benchmarks.gateway.bare import GOAL
from benchmarks.gateway.processes import VLLM_DTYPE
from benchmarks.gateway.rounds import Figures

VLLM_GOAL = 2.0
"""Goal for the gateway's tokens per second relative to vLLM's server, with all requests at once."""


def table(rows: Sequence[Figures], arguments: argparse.Namespace) -> Table:
    view = report.table(
        f"{arguments.model}, {arguments.requests} requests of {arguments.prompt_tokens} tokens in and "
        f"{arguments.max_tokens} out; vLLM's server in {VLLM_DTYPE}; ms per request",
        ("way", "load"),
        ("tok/s", "first token", "p99", "per token", "request", "p50", "p99", "compared", "processor"),
    )
    for row in rows:
        times = (
            row.first_token_ms,
            row.first_token_p99_ms,
            row.per_token_ms,
            row.mean_ms,
            row.p50_ms,
            row.p99_ms,
        )
        view.add_row(
            row.way, row.load, f"{row.tokens_per_s:.0f}", *("" if each is None else f"{each:.2f}" for each in times),
            _compared(row, rows), ", ".join(f"{name} {ms:.2f}" for name, ms in row.cpu_ms.items()),
        )  # fmt: skip
    for load, alone in {row.load: row.bare for row in rows if row.bare is not None}.items():
        view.add_row(
            "bare engine", load, f"{alone.tokens_per_s:.0f}", *[""] * 7, f"engine {alone.cpu_ms:.2f}"
        )
    return view


def _compared(row: Figures, rows: Sequence[Figures]) -> str:
    """Compare with direct submission, the bare engine and vLLM's server under the same load, where measured."""
    found = []
    others = {each.way: each for each in rows if each.load == row.load and each.way != row.way}
    if (direct := others.get("direct")) is not None:
        found.append(f"{row.mean_ms - direct.mean_ms:+.2f} over direct")
    if row.share_of_bare is not None:
        goal = f" (goal {GOAL:.0%})" if row.is_streamed else ""
        found.append(f"{row.share_of_bare:.1%} of bare{goal}")
    if (vllm := others.get("vLLM, streamed")) is not None:
        goal = f" (goal {VLLM_GOAL:g} x)" if row.load.endswith("at once") else ""
        found.append(f"{row.tokens_per_s / vllm.tokens_per_s:.2f} x vLLM{goal}")
    return ", ".join(found)
