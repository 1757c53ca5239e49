"""KV memory of models whose layers have windows: groups of layers that free what is behind, beside one group.

`python -m benchmarks.kv.windows`. The shapes are those of published models; the engine's own scheduler and pool run
every step, tokens are made up, and no clock is read: the figures are the same on every machine.

First a single sequence that fills the model's context: the bytes of its blocks, and the share of them that holds what
no query will read. vllm#11382 gives 25 % for Gemma 2 and 56 % for Ministral 8B where one table serves all layers.
Then documents of many lengths, up to the context, through a pool in which one group holds two whole contexts: how
many run at once, and in how many steps all are done.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import result_path, write
from benchmarks.workloads import Lognormal
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.layers.kv_cache_shape import KVCacheShape, layer_groups
from pagemill.engine.plan import StepResult
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Request, Sequence
from pagemill.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
CHUNK = 2048
CONTEXTS_IN_POOL = 2
OUTPUT_TOKENS = 1024
MAX_NUM_SEQS = 64


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    windows: tuple[int | None, ...]
    """By layer."""
    num_kv_heads: int
    head_dim: int
    context: int

    def shape(self, *, is_grouped: bool) -> KVCacheShape:
        """The cache in bf16."""
        groups = layer_groups(self.windows, self.context) if is_grouped else ()
        sizes = (len(self.windows), self.num_kv_heads, self.head_dim, BLOCK_SIZE)
        return KVCacheShape(*sizes, torch.bfloat16, groups)


MODELS = (
    Model("Gemma 2 9B", (4096, None) * 21, 8, 256, 8192),
    Model("Ministral 8B", (None, 32768, 32768, 32768) * 9, 8, 128, 131072),
    Model("Gemma 3 27B", ((1024,) * 5 + (None,)) * 10 + (1024, 1024), 16, 128, 131072),
    Model("Mistral 7B v0.1", (4096,) * 32, 8, 128, 32768),
)


@dataclass(frozen=True, slots=True)
class Held:
    """What a run held, over its steps by bytes, or at its largest."""

    groups: int
    steps: int
    largest_gib: float
    unread: float
    """Share of the active blocks' slots, over the run, that hold what no query will read."""
    unread_at_end: float
    """The same in the last step."""
    unfilled: float
    """Share of the slots that hold nothing."""
    rows: float
    """Sequences that ran in a step, on average."""
    preemptions: int


def run(
    model: Model, lengths: Iterable[tuple[int, int]], *, is_grouped: bool, pool_bytes: int | None = None
) -> Held:
    """Run requests of (prompt, output) tokens to their end, all of them waiting from the start."""
    shape = model.shape(is_grouped=is_grouped)
    whole_context = -(-model.context // BLOCK_SIZE) * len(shape.windows)
    num_blocks = 1 + (whole_context if pool_bytes is None else pool_bytes // shape.block_bytes)
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks,
            max_model_len=model.context,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=CHUNK,
            kv_windows=shape.windows,
            enable_prefix_caching=False,
        )
    )
    requests = [_request(number, *pair) for number, pair in enumerate(lengths)]
    for request in requests:
        scheduler.add_request(request)
    taken = filled = unread = rows = steps = largest = 0
    unread_at_end = 0.0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        assert plan is not None, "synchronous steps always find work"
        stats = scheduler.kv_cache.stats()
        running = [s for r in requests for s in r.sequences if s.row is not None]
        slots = stats.active_blocks * BLOCK_SIZE
        behind = sum(_unread_slots(model, shape, sequence) for sequence in running)
        taken, filled, unread = taken + slots, filled + stats.filled_slots, unread + behind
        largest, unread_at_end = max(largest, stats.active_blocks), behind / slots
        rows, steps = rows + len(running), steps + 1
        scheduler.update(plan, StepResult(plan.step_id, [[1] for _ in plan.samples]))
    preemptions = scheduler.stats().preemptions
    gib = largest * shape.block_bytes / 2**30
    return Held(
        len(shape.windows), steps, gib, unread / taken, unread_at_end, 1 - filled / taken, rows / steps,
        preemptions,
    )  # fmt: skip


def _request(number: int, num_prompt_tokens: int, num_output_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    request = Request(str(number), [2 + number, *[1] * (num_prompt_tokens - 1)], params, seed=0)
    request.sequences.append(Sequence(request, 0))
    return request


def _unread_slots(model: Model, shape: KVCacheShape, sequence: Sequence) -> float:
    """Return the slots of a sequence's blocks whose tokens no query will read, on average over a block's layers."""
    position, table, count = sequence.num_computed_tokens, sequence.block_ids, len(shape.windows)
    slots = 0.0
    if not shape.groups:
        behind = (max(0, position - window) for window in model.windows if window is not None)
        return sum(behind) / len(model.windows)
    for number, window in enumerate(shape.windows):
        if window is not None:
            slots += max(0, position - window - BLOCK_SIZE * table[number::count].count(0))
    return slots


def documents(model: Model, count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of `count` documents: a quarter of the context is the median, the whole the most."""
    rng = random.Random(f"documents {seed}")
    longest = model.context - OUTPUT_TOKENS
    drawn = Lognormal(median=model.context // 4, sigma=0.8, low=256, high=longest)
    return [(drawn.draw(rng), OUTPUT_TOKENS) for _ in range(count)]


def measure(model: Model, count: int, seed: int) -> dict[str, object]:
    whole = [(model.context - OUTPUT_TOKENS, OUTPUT_TOKENS)]
    context = {name: run(model, whole, is_grouped=name == "grouped") for name in ("one_group", "grouped")}
    one = model.shape(is_grouped=False)
    pool_bytes = CONTEXTS_IN_POOL * -(-model.context // BLOCK_SIZE) * one.block_bytes
    drawn = documents(model, count, seed)
    busy = {
        name: run(model, drawn, is_grouped=name == "grouped", pool_bytes=pool_bytes)
        for name in ("one_group", "grouped")
    }
    return {
        "model": model.name,
        "context": model.context,
        "pool_gib": pool_bytes / 2**30,
        "whole_context": {name: asdict(held) for name, held in context.items()},
        "documents": {name: asdict(held) for name, held in busy.items()},
        "memory_of_whole_context": context["grouped"].largest_gib / context["one_group"].largest_gib,
        "steps_of_documents": busy["grouped"].steps / busy["one_group"].steps,
    }


def table(figures: list[dict[str, object]]) -> Table:
    view = Table(title="KV memory of layers with windows: one group of layers -> a group per window")
    for column in (
        "model",
        "context",
        "GiB",
        "never read",
        "documents at once",
        "steps",
        "never read",
        "unfilled",
    ):
        view.add_column(column, justify="left" if column == "model" else "right")
    for figure in figures:
        whole, busy = figure["whole_context"], figure["documents"]
        assert isinstance(whole, dict)
        assert isinstance(busy, dict)

        def both(held: dict[str, dict[str, float]], name: str, style: str) -> str:
            return f"{held['one_group'][name]:{style}} -> {held['grouped'][name]:{style}}"

        view.add_row(
            str(figure["model"]), f"{figure['context']:,}",
            both(whole, "largest_gib", ".2f"), both(whole, "unread_at_end", ".1%"),
            both(busy, "rows", ".1f"), both(busy, "steps", ",d"), both(busy, "unread", ".1%"),
            both(busy, "unfilled", ".2%"),
        )  # fmt: skip
    return view


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    figures = [measure(model, given.documents, given.seed) for model in MODELS]
    now = datetime.now(UTC)
    path = given.out or result_path("kv-windows", now)
    report = {
        "question": "KV memory of layers with windows, a group per window beside one group",
        "date": now.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {
            "documents": given.documents, "seed": given.seed, "block_size": BLOCK_SIZE, "chunk": CHUNK,
            "output_tokens": OUTPUT_TOKENS, "max_num_seqs": MAX_NUM_SEQS, "contexts_in_pool": CONTEXTS_IN_POOL,
        },
        "figures": figures,
    }  # fmt: skip
    write(path, report)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(figures))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
