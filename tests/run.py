"""Run a tier of the tests in several processes, and what failed again, alone.

    python -m tests.run                      the quick tier (`make test`)
    python -m tests.run --all                every test, part by part (`make check-all`)
    python -m tests.run --all --part chaos   one part

A test that fails runs again by itself, up to twice. If it passes then, it is reported as FLAKY with the traceback of
its first failure, and the run passes. A flaky test depends on something that it does not control: find the cause.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = "not slow"
ALL = "slow or not slow"
ATTEMPTS = 2
"""Timeout of a failed test that runs alone."""
MAX_RETRIED = 12
"""More failures than this are not a coincidence, and rerunning them would take long."""
TESTS_FAILED = 1
"""Exit codes of pytest. Other codes mean that it could not run the tests."""
CRASHED = 70
"""Replaces exit code 0 if a test ended the process."""

PARTS: dict[str, tuple[str, ...]] = {
    "engine": ("tests/engine",),
    "execution": ("tests/engine/execution", "tests/engine/scheduling", "tests/engine/layers"),
    "models": ("tests/engine/models", "tests/engine/combinations"),
    "kernels": ("tests/kernels",),
    "aot": ("tests/kernels/aot",),
    "queue": ("tests/producer/wire", "tests/golden"),
    "producer": ("tests/producer",),
    "worker": ("tests/worker", "tests/monitoring", "tests/supervisor", "tests/sizing"),
    "commands": ("tests/cli", "tests/demo", "tests/integration/cli"),
    "celery": ("tests/integration/celery",),
    "integration": ("tests/integration",),
    "chaos": ("tests/chaos",),
    "adversarial": ("tests/adversarial",),
    "project": ("tests",),
}
"""The paths of each part; the most specific path of a test decides."""
MADE = ("oldest-triton", "oldest-transformers", "compiled-ir")
"""Parts that `make` runs: they need another version of a library."""


@dataclass(slots=True)
class Outcome:
    """The result of a pytest run, including the reruns of its failures."""

    name: str
    seconds: float = 0.0
    code: int = 0
    flaky: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def paths_of(part: str) -> list[str]:
    """Return pytest's arguments that select the tests of a part."""
    own = PARTS[part]
    others = [path for paths in PARTS.values() for path in paths if path not in own]
    nested = [path for path in others if any(path.startswith(f"{one}/") for one in own)]
    return [*own, *(f"--ignore={path}" for path in nested)]


def run(
    name: str, arguments: Sequence[str], processes: int, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run pytest, then only its failures."""
    outcome, start = Outcome(name), time.monotonic()
    command = f"-n {processes} --dist loadfile --no-loadscope-reorder --durations 20".split()
    outcome.code, failures = _pytest([*command, *arguments], environment or {})
    if outcome.code == TESTS_FAILED and 0 < len(failures) <= MAX_RETRIED:
        for test, traceback in failures.items():
            if _passes_alone(test):
                outcome.flaky.append(test)
                print(f"FLAKY {test}: passed alone. Its first traceback:\n{traceback}", flush=True)
            else:
                outcome.failed.append(test)
        outcome.code = TESTS_FAILED if outcome.failed else 0
    else:
        outcome.failed = list(failures)
    outcome.seconds = time.monotonic() - start
    return outcome


def _passes_alone(test: str) -> bool:
    for attempt in range(1, ATTEMPTS + 1):
        print(f"==> again, alone ({attempt} of {ATTEMPTS}): {test}", flush=True)
        code, _ = _pytest(["-m", ALL, test], {})
        if code == 0:
            return True
    return False


def _pytest(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Return pytest's exit code, and the traceback of each test that failed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "failures.jsonl"
        # One thread per process: several threads per process would compete for the cores.
        own = {"OMP_NUM_THREADS": "1", "PAGEMILL_TEST_FAILURES": str(path)}
        command = [sys.executable, "-m", "pytest", "-p", "tests.failures", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | environment | own, check=False).returncode
        failures: dict[str, str] = {}
        has_ended = False
        for line in path.read_text().splitlines() if path.is_file() else ():
            entry = json.loads(line)
            has_ended = has_ended or "ended" in entry
            if "test" in entry:
                failures.setdefault(entry["test"], entry["traceback"])
        return code if has_ended else code or CRASHED, failures


def run_parts(parts: Sequence[str], processes: int) -> list[Outcome]:
    """Run each part, regardless of the results of earlier parts."""
    from tests.produced_metrics import never_produced  # imports a worker: not needed for the quick tier

    outcomes = []
    with tempfile.TemporaryDirectory() as directory:
        produced = Path(directory) / "metrics"
        environment = {"PAGEMILL_PRODUCED_METRICS": str(produced)}
        for part in parts:
            print(f"==> {part}", flush=True)
            if part in MADE:
                outcomes.append(_make(part))
            else:
                outcomes.append(run(part, ["-m", ALL, *paths_of(part)], processes, environment))
        if set(parts) >= set(PARTS) and (missing := never_produced(produced)):
            print("no test made a worker produce:", *missing, sep="\n  ")
            outcomes.append(Outcome("metrics", code=TESTS_FAILED, failed=missing))
    return outcomes


def _make(target: str) -> Outcome:
    start = time.monotonic()
    code = subprocess.run(["make", "--no-print-directory", target], cwd=ROOT, check=False).returncode
    return Outcome(target, time.monotonic() - start, code)


def _summary(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'part':<20} {'result':<8} {'seconds':>7} {'failed':>6} {'flaky':>5}")
    for each in outcomes:
        result = "FAILED" if each.code else "passed"
        print(f"{each.name:<20} {result:<8} {each.seconds:>7.0f} {len(each.failed):>6} {len(each.flaky):>5}")
    for each in outcomes:
        for test in each.failed:
            print(f"FAILED {test}")
        for test in each.flaky:
            print(f"FLAKY {test}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every test, in parts")
    parser.add_argument("--part", action="append", choices=[*PARTS, *MADE], help="of --all; may be repeated")
    parser.add_argument("--processes", type=int, default=3, help="most tests wait more than they compute")
    options = parser.parse_args(arguments)
    if options.part and not options.all:
        parser.error("--part chooses from --all")
    if options.all:
        outcomes = run_parts(options.part or [*PARTS, *MADE], options.processes)
    else:
        outcomes = [run("quick", ["-m", QUICK], options.processes)]
    _summary(outcomes)
    return int(any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
