"""The cost of planning: milliseconds to plan and to retire a step in which every row decodes.

`python -m benchmarks.scheduler`. No model: tokens are made up, so that nothing but the scheduler is timed. The CPU
time of the process is what counts, and the fastest step beside the median one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import RESULTS
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.plan import StepResult
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Request, Sequence
from pagemill.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = range(8, 24)
"""Lengths that differ, so that every step has rows that begin a block."""


@dataclass(frozen=True, slots=True)
class Cost:
    rows: int
    schedule_ms: float
    schedule_fastest_ms: float
    update_ms: float
    update_fastest_ms: float


def measure(num_rows: int, num_steps: int) -> Cost:
    """Decode `num_steps` tokens in `num_rows` rows, each step collected before the next is planned."""
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_rows * (2 + (PROMPT_TOKENS.stop + num_steps) // BLOCK_SIZE),
            max_model_len=PROMPT_TOKENS.stop + num_steps + 2,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * PROMPT_TOKENS.stop,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 1, ignore_eos=True)
    for number in range(num_rows):
        length = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
        request = Request(str(number), [number, *range(length - 1)], params, seed=0)
        request.sequences.append(Sequence(request, 0))
        scheduler.add_request(request)
    planned, retired = [], []
    for number in range(num_steps):
        began = time.process_time()
        plan = scheduler.schedule()
        planned.append(time.process_time() - began)
        assert plan is not None
        result = StepResult(plan.step_id, [[number] for _ in plan.samples])
        began = time.process_time()
        scheduler.update(plan, result)
        retired.append(time.process_time() - began)
    planned, retired = planned[1:], retired[1:]  # the first step is the prompts'
    return Cost(
        num_rows, *(1000 * value for value in (median(planned), min(planned), median(retired), min(retired)))
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1000])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if machine.is_busy():
        print("this machine is busy: the figures will be too high", file=sys.stderr)
    costs = [measure(rows, arguments.steps) for rows in arguments.rows]
    table = Table(
        "rows", "schedule ms", "fastest", "update ms", "fastest", title="A decode step's bookkeeping"
    )
    for cost in costs:
        _, *milliseconds = asdict(cost).values()
        table.add_row(str(cost.rows), *(f"{value:.2f}" for value in milliseconds))
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"scheduler-{now:%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps({"at": now.isoformat(), "costs": [asdict(cost) for cost in costs]}, indent=1))
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
