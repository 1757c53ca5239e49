"""Every CPU result of docs/performance.md, one benchmark after another; needs an idle machine.

`python -m benchmarks.all`: about three hours on two cores with all peers (`python -m benchmarks --install-peers`).
`--quick`: only Pagemill's engine and vLLM with few rounds, about forty minutes. A failed benchmark is reported
at the end, and does not prevent the others from running.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.engines.process import ROOT

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("benchmarks.startup",),
    ("benchmarks.structured_output",),
    ("benchmarks",),
    ("benchmarks.roofs",),
    ("benchmarks.bulk",),
    ("benchmarks.decoding.experts",),
    ("benchmarks.decoding.gguf",),
    ("benchmarks.engines.speculation",),
    ("benchmarks.engines.host_tier",),
    ("benchmarks.gateway", "--model", "smollm2"),
    ("benchmarks.worker_overhead",),
    ("benchmarks.endpoint_overhead",),
    ("benchmarks.queues.rates",),
)
QUICK: dict[str, tuple[str, ...]] = {
    "benchmarks": ("--engines", "pagemill", "vllm", "--rounds", "3"),
    "benchmarks.bulk": ("--rounds", "1", "--rows", "1000"),
    "benchmarks.worker_overhead": ("--rounds", "1"),
}


def commands(quick: bool) -> list[list[str]]:
    """The command lines, without the interpreter."""
    return [["-m", *command, *(QUICK.get(command[0], ()) if quick else ())] for command in COMMANDS]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer engines, rounds and sizes")
    given = parser.parse_args()
    failed = []
    for command in commands(given.quick):
        print("==> python " + " ".join(command), flush=True)
        started = time.monotonic()
        if subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode != 0:
            failed.append(" ".join(command))
        print(f"    {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
