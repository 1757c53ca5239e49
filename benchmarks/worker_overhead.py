"""The cost of queue, worker and producer: the bare engine compared with all of them, on the same requests.

`python -m benchmarks.worker_overhead`. The sides run their passes alternately, as in `benchmarks.throughput`.
The remaining share of the bare engine's throughput is computed round by round, and all sides must generate
the same tokens. The worker runs with its engine on a thread and in a separate process. CPU time is also
reported, because it is valid on a busy machine. It includes the client and the server of the queue, which
share the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.table import Table

from benchmarks import report, throughput
from benchmarks.engines.contenders import Contender
from benchmarks.throughput import Measurements, ratio_cell, spread_text
from benchmarks.workloads import Workload

GOAL = 0.97
BARE = Contender("bare", "benchmarks.engines.pagemill", "the engine alone, offline")
QUEUED = tuple(
    Contender(
        name,
        "benchmarks.engines.queued",
        f"producer, Valkey and worker, its engine {where}",
        options=(("engine_process", value),),
    )
    for name, value, where in (
        ("thread", "off", "on a thread"),
        ("process", "on", "in a process of its own"),
    )
)


def summary(measurements: Measurements, workloads: Sequence[Workload]) -> dict[str, Any]:
    return {
        workload.name: {
            "requests": len(workload.prompts),
            "output_tokens": workload.num_output_tokens,
            "tokens_per_second": {
                name: measurements.rates(name, workload.name) for name in measurements.contenders
            },
            **{way.name: _against_bare(measurements, way.name, workload.name) for way in QUEUED},
        }
        for workload in workloads
    }


def _against_bare(measurements: Measurements, contender: str, workload: str) -> dict[str, Any]:
    return {
        "share_of_bare": measurements.ratios(contender, BARE.name, workload),
        "processor_time_over_bare": measurements.processor_ratios(contender, BARE.name, workload),
        "same_tokens": measurements.equal_outputs(contender, BARE.name, workload),
    }


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    columns: dict[str, throughput.Cell] = {
        "of bare": lambda engine, workload: ratio_cell(measurements, engine, BARE.name, workload),
        "processor time": lambda engine, workload: spread_text(
            measurements.processor_ratios(engine, BARE.name, workload)
        ),
        "same tokens": partial(throughput.same_cell, measurements, BARE.name),
    }
    title = f"The worker beside the bare engine (goal: {GOAL:.0%} of its throughput)"
    return throughput.rates_table(title, measurements, workloads, columns)


def main() -> int:
    parser = report.parser(__doc__)
    throughput.add_arguments(parser, rounds=3)
    given = throughput.checked(parser)
    question = "share of the bare engine's throughput that the whole product keeps"
    file = report.Report("worker-overhead", question, given)
    request, workloads, vocab_size = throughput.prepare(given, {})
    console, measurements = report.console(), Measurements()
    throughput.measure_all(
        measurements, (BARE, *QUEUED), request, workloads, vocab_size=vocab_size, rounds=given.rounds,
        console=console,
    )  # fmt: skip
    if measurements.failures:
        return 1
    file.write({"workloads": summary(measurements, workloads)})
    console.print(table(measurements, workloads))
    console.print(f"written to {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
