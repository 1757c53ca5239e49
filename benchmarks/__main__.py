"""`python -m benchmarks`: measure, print the table, write it as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, throughput
from benchmarks.engines import peers
from benchmarks.engines.contenders import CONTENDERS, available_contenders
from benchmarks.measure import Request
from benchmarks.report import model_directory, result_path, write
from benchmarks.workloads import WORKLOADS, Workload


def main() -> int:
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.install_peers:
        return _install_peers(console)
    if machine.is_busy():
        print("this machine is busy: the figures will be too low, and the ratios doubtful", file=sys.stderr)
    contenders = available_contenders(arguments.engines)
    if not contenders:
        print(f"none of {', '.join(arguments.engines)} can run here", file=sys.stderr)
        return 2
    directory = model_directory(arguments.model)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    workloads = [WORKLOADS[name](vocab_size, arguments.seed, arguments.share) for name in arguments.workloads]
    request = throughput.build_request(
        str(directory), vocab_size, workloads, seed=arguments.seed, share=arguments.share,
        kv_cache_gib=arguments.kv_cache_gib, options=dict(arguments.engine_option),
    )  # fmt: skip
    started, where = datetime.now(UTC), machine.describe()
    path = arguments.out or result_path("throughput", started)
    measurements = throughput.Measurements()
    # `kill` ends the engines as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    passes = throughput.measure_all(
        measurements, contenders, request, workloads, vocab_size=vocab_size, rounds=arguments.rounds,
        console=console,
    )  # fmt: skip
    try:
        with contextlib.closing(passes):
            # Written after every pass: a run that is cut short keeps what it has measured.
            for _ in passes:
                report = _report(arguments, request, workloads, measurements, started, where)
                write(path, report)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured until now follows", file=sys.stderr)
    if not measurements.passes:
        return 130 if interrupted else 1
    console.print(throughput.table(measurements, workloads))
    console.print(f"written to {path}")
    return 130 if interrupted else 1 if measurements.failures else 0


def _report(
    arguments: argparse.Namespace, request: Request, workloads: Sequence[Workload],
    measurements: throughput.Measurements, started: datetime, where: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    return {
        "question": "output tokens per second, offline, greedy",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "model": arguments.model,
        "settings": {
            "seed": arguments.seed,
            "share": arguments.share,
            "rounds": arguments.rounds,
            "kv_cache_gib": arguments.kv_cache_gib,
            "engine_options": request.options,
        },
        "versions": {name: ready.versions for name, ready in measurements.ready.items()},
        "load_seconds": {name: round(ready.load_seconds, 1) for name, ready in measurements.ready.items()},
        "peak_memory_bytes": measurements.peak_memory_bytes,
        "failures": measurements.failures,
        "workloads": throughput.summary(measurements, workloads),
        "passes": throughput.passes_as_json(measurements),
    }


def _parse() -> argparse.Namespace:
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=throughput.__doc__)
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5, help="passes of every engine, taking turns")
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of each workload's requests, for a dry run"
    )
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="KV cache of every engine that has one")
    parser.add_argument(
        "--engine-option", action="append", default=[], type=_option, metavar="NAME=JSON",
        help="option for our engine, for instance max_num_seqs=32; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    parser.add_argument(
        "--install-peers", action="store_true", help="make the peers' environments (some 4 GB), and stop"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not 0.0 < arguments.share <= 1.0:
        parser.error("--rounds must be at least 1 and --share in (0, 1]")
    return arguments


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON") from error


def _install_peers(console: Console) -> int:
    failed = 0
    for peer in peers.PEERS:
        console.print(f"installing {' '.join(peer.requirements)} into {peer.directory()}, several minutes")
        try:
            peer.install()
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"{peer.name} could not be installed: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
