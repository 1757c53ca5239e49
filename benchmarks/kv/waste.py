"""The share of allocated KV slots that hold nothing: paged blocks beside a slot for every possible token.

`python -m benchmarks.kv.waste`. Lengths are drawn as ShareGPT's are: the figures of the PagedAttention paper
(Kwon et al., 2023, figure 11) for its conversations, 161 tokens in and 338 out on average, both with a long tail. The
engine's own scheduler and pool run every step of it; the tokens are made up, since no value of theirs matters here,
and no clock is read: the figures are the same on every machine.

Waste is the share of slots in allocated blocks that no token fills, averaged over the run's steps by blocks. Beside
it, for the same requests in the same steps: a slot for every token that the model's context could hold, and for the
next power of two of what each will really need, which takes knowing it.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import result_path, write
from benchmarks.workloads import Lognormal
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.plan import StepResult
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Request, Sequence
from pagemill.engine.scheduling.scheduler import Scheduler

MAX_MODEL_LEN = 2048
"""The context that the paper's preallocating baselines reserve (OPT's)."""
# A lognormal's mean is its median times exp(sigma^2 / 2).
PROMPT_TOKENS = Lognormal(median=78, sigma=1.2, low=4, high=1024)
OUTPUT_TOKENS = Lognormal(median=205, sigma=1.0, low=4, high=1024)
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
GOAL = 0.04


@dataclass(frozen=True, slots=True)
class Waste:
    block_size: int
    steps: int
    paged: float
    """Share of the slots in allocated blocks that hold nothing, over the run."""
    peak: float
    """The same in the step where it was largest, of those with at least half of the rows taken."""
    whole_context: float
    """The share that a slot per token of the context wastes."""
    power_of_two: float
    """The share that the next power of two of each request's final length wastes."""
    rows_in_same_memory: float
    """Rows that paging holds in the memory in which whole contexts hold one."""


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of `count` requests."""
    rng = random.Random(f"sharegpt {seed}")
    return [(PROMPT_TOKENS.draw(rng), OUTPUT_TOKENS.draw(rng)) for _ in range(count)]


def measure(
    requests: list[tuple[int, int]], block_size: int, *, max_num_seqs: int, pool_tokens: int
) -> Waste:
    """Run the requests to their end, all of them waiting from the start."""
    scheduler = _scheduler(requests, block_size, max_num_seqs, pool_tokens)
    totals = {int(number): sum(pair) for number, pair in enumerate(requests)}
    taken = filled = whole = rounded = rows = steps = 0
    peak = 0.0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        assert plan is not None, "synchronous steps always find work"
        stats = scheduler.kv_cache.stats()
        allocated = stats.active_blocks * block_size
        running = [int(request_id) for request_id in scheduler.request_ids(plan)]
        taken, filled, steps = taken + allocated, filled + stats.filled_slots, steps + 1
        rows += len(running)
        whole += MAX_MODEL_LEN * len(running)
        rounded += sum(1 << (totals[number] - 1).bit_length() for number in running)
        if 2 * len(running) >= max_num_seqs:
            peak = max(peak, 1 - stats.filled_slots / allocated)
        scheduler.update(plan, StepResult(plan.step_id, [[1] for _ in plan.samples]))
    return Waste(
        block_size, steps, 1 - filled / taken, peak, 1 - filled / whole, 1 - filled / rounded, whole / taken
    )


def _scheduler(
    requests: list[tuple[int, int]], block_size: int, max_num_seqs: int, pool_tokens: int
) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=block_size,
            num_kv_blocks=pool_tokens // block_size + 1,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
        )
    )
    for number, (num_prompt_tokens, num_output_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        # The first token sets every prompt apart: sharing would fill more than was taken.
        request = Request(str(number), [2 + number, *[1] * (num_prompt_tokens - 1)], params, seed=0)
        request.sequences.append(Sequence(request, 0))
        scheduler.add_request(request)
    return scheduler


def table(figures: list[Waste]) -> Table:
    view = Table(title=f"KV slots taken and not filled (ShareGPT-like lengths, context {MAX_MODEL_LEN})")
    columns = (
        "block size",
        "paged",
        "worst step",
        "whole context",
        "power of two",
        "rows in the same memory",
    )
    for column in columns:
        view.add_column(column, justify="right")
    for waste in figures:
        shares = (waste.paged, waste.peak, waste.whole_context, waste.power_of_two)
        view.add_row(
            str(waste.block_size), *(f"{share:.2%}" for share in shares), f"{waste.rows_in_same_memory:.1f} x"
        )
    return view


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--pool-tokens", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    if given.pool_tokens < MAX_MODEL_LEN:
        parser.error(f"--pool-tokens must hold a whole context, {MAX_MODEL_LEN}")
    requests = lengths(given.requests, given.seed)
    figures = [
        measure(requests, size, max_num_seqs=given.max_num_seqs, pool_tokens=given.pool_tokens)
        for size in given.block_sizes
    ]
    now = datetime.now(UTC)
    path = given.out or result_path("kv-waste", now)
    report = {
        "question": "share of allocated KV slots that hold nothing",
        "date": now.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {
            "requests": given.requests, "seed": given.seed, "max_num_seqs": given.max_num_seqs,
            "pool_tokens": given.pool_tokens, "context": MAX_MODEL_LEN,
        },
        "waste": [asdict(waste) for waste in figures],
    }  # fmt: skip
    write(path, report)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(figures))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
