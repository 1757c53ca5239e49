"""`python -m benchmarks`: measure, print the table, write it as JSON."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from typing import Any

from rich.console import Console

from benchmarks import report, throughput
from benchmarks.engines import peers
from benchmarks.engines.contenders import CONTENDERS, available_contenders


def main() -> int:
    arguments = _parse()
    console = report.console()
    if arguments.install_peers:
        return _install_peers(console)
    contenders = available_contenders(arguments.engines)
    if not contenders:
        print(f"none of {', '.join(arguments.engines)} can run here", file=sys.stderr)
        return 2
    file = report.Report("throughput", "output tokens per second, offline, greedy", arguments)
    request, workloads, vocab_size = throughput.prepare(arguments, dict(arguments.engine_option))
    measurements = throughput.Measurements()

    def write(_name: str) -> None:
        """Write the file after every pass, so that an aborted run keeps its results."""
        found = throughput.as_json(measurements)
        file.write({"workloads": throughput.summary(measurements, workloads)} | found)

    # `kill` stops the engines like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    try:
        throughput.measure_all(
            measurements, contenders, request, workloads, vocab_size=vocab_size, rounds=arguments.rounds,
            console=console, after_pass=write,
        )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured until now follows", file=sys.stderr)
    if not measurements.passes:
        return 130 if interrupted else 1
    console.print(throughput.table(measurements, workloads))
    console.print(f"written to {file.path}")
    return 130 if interrupted else 1 if measurements.failures else 0


def _parse() -> argparse.Namespace:
    names = [contender.name for contender in CONTENDERS]
    parser = report.parser(throughput.__doc__)
    parser.prog = "python -m benchmarks"
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    throughput.add_arguments(parser, rounds=5)
    parser.add_argument(
        "--engine-option", action="append", default=[], type=_option, metavar="NAME=JSON",
        help="option for our engine, for instance max_num_seqs=32; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--install-peers", action="store_true", help="make the peers' environments (some 4 GB), and stop"
    )
    return throughput.checked(parser)


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
