"""Run the quick tests under conditions that they must not depend on.

    python -m tests.shake                    each condition, one after the other (hours)
    python -m tests.shake busy one-core      these
    python -m tests.shake --list             their names

A condition that cannot be set up on this machine counts as failed, and the table says what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.run import QUICK, ROOT
from tests.server_clock import build_library

TESTS = (".venv/bin/python", "-m", "tests.run", "--processes", "3")
CLONE_LENGTH = 120
"""Number of characters in the path of a checkout."""


class UnavailableError(Exception):
    """This machine does not support a condition."""


@dataclass(frozen=True)
class Setup:
    """How the tests run under a condition."""

    command: tuple[str, ...] = TESTS
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path = ROOT


Condition = Callable[[], contextlib.AbstractContextManager[Setup]]


@contextlib.contextmanager
def busy() -> Iterator[Setup]:
    """Two processes that compute all the time, and stop with this one."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        yield Setup()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def one_core() -> Iterator[Setup]:
    """All processes on one core."""
    core = min(os.sched_getaffinity(0))
    yield Setup((_program("taskset", "util-linux"), "-c", str(core), *TESTS))


def uptime(seconds: int) -> Condition:
    """A monotonic clock this far ahead: in a time namespace, the same for all processes."""

    @contextlib.contextmanager
    def condition() -> Iterator[Setup]:
        unshare = [_program("unshare", "util-linux"), "--time", "--fork"]
        if os.geteuid() != 0:
            unshare[1:1] = ["--user", "--map-current-user"]
        unshare += ["--monotonic", str(seconds), "--boottime", str(seconds)]
        tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            raise UnavailableError(f"this kernel gives no time namespace: {tried.stderr.strip()}")
        yield Setup((*unshare, *TESTS))

    return condition


def date(ahead: Callable[[], int]) -> Condition:
    """A wall clock this many seconds ahead, in all processes that use the C library; not the monotonic clock."""

    @contextlib.contextmanager
    def condition() -> Iterator[Setup]:
        with tempfile.TemporaryDirectory() as directory:
            try:
                library = build_library(Path(directory))
            except FileNotFoundError as error:
                raise UnavailableError(str(error)) from None
            yield Setup(environment={"LD_PRELOAD": str(library), "CLOCK_SHIFT_S": str(ahead())})

    return condition


def _to_leap_day() -> int:
    return int((datetime(2028, 2, 29, 12, tzinfo=UTC) - datetime.now(UTC)).total_seconds())


@contextlib.contextmanager
def long_path() -> Iterator[Setup]:
    """A clone of HEAD with a separate environment, in a path of 120 characters with a space, outside /tmp."""
    with tempfile.TemporaryDirectory(prefix="pagemill ", dir="/var/tmp") as parent:
        name = "a checkout ".ljust(CLONE_LENGTH - len(parent) - 1, "x")
        clone = Path(parent) / name
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "--no-print-directory", "setup"], cwd=clone, check=True)
        yield Setup(("make", "--no-print-directory", "test"), directory=clone)


@contextlib.contextmanager
def locale() -> Iterator[Setup]:
    """The time zone that is farthest ahead, and no UTF-8."""
    yield Setup(environment={"TZ": "Pacific/Kiritimati", "LC_ALL": "C"})


@contextlib.contextmanager
def empty_home() -> Iterator[Setup]:
    """No caches, no user settings."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "XDG_CACHE_HOME": "", "PAGEMILL_CACHE_DIR": ""}
        yield Setup(("make", "--no-print-directory", "test"), environment)


@contextlib.contextmanager
def random_order() -> Iterator[Setup]:
    """The files in random order, all in one process."""
    pytest = (".venv/bin/python", "-m", "pytest", "-m", QUICK)
    collect = [*pytest, "--collect-only", "--quiet", "--quiet", "--no-header"]
    collected = subprocess.run(collect, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    files = sorted({line.partition(":")[0] for line in collected.splitlines() if line.startswith("tests/")})
    seed = int(os.environ.get("PAGEMILL_TEST_ORDER", random.randrange(2**32)))
    print(f"==> PAGEMILL_TEST_ORDER={seed} repeats this order of {len(files)} files", flush=True)
    random.Random(seed).shuffle(files)
    yield Setup((*pytest, *files), {"OMP_NUM_THREADS": "1"})


CONDITIONS: dict[str, Condition] = {
    "busy": busy,
    "one-core": one_core,
    "uptime-8h": uptime(30_000),
    "uptime-12d": uptime(1_000_000),
    "date-40d": date(lambda: 40 * 24 * 3600),
    "leap-day": date(_to_leap_day),
    "long-path": long_path,
    "locale": locale,
    "empty-home": empty_home,
    "random-order": random_order,
}


def _program(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise UnavailableError(f"{name} is missing; install the package {package}")
    return path


def run(name: str) -> tuple[str, float]:
    """Return the result of the tests under a condition, and their duration in seconds."""
    start = time.monotonic()
    print(f"==> {name}", flush=True)
    try:
        with CONDITIONS[name]() as setup:
            environment = os.environ | setup.environment
            done = subprocess.run(setup.command, cwd=setup.directory, env=environment, check=False)
            result = "passed" if done.returncode == 0 else f"FAILED (exit {done.returncode})"
    except (UnavailableError, subprocess.CalledProcessError) as error:
        result = f"FAILED: {error}"
    return result, time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.shake", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the conditions")
    options = parser.parse_args(arguments)
    if unknown := set(options.conditions) - set(CONDITIONS):
        parser.error(f"unknown condition {sorted(unknown)[0]}; choose from {', '.join(CONDITIONS)}")
    if options.list:
        print(*CONDITIONS, sep="\n")
        return 0
    results = {name: run(name) for name in options.conditions or CONDITIONS}
    print(f"\n{'condition':<14} {'seconds':>7} result")
    for name, (result, seconds) in results.items():
        print(f"{name:<14} {seconds:>7.0f} {result}")
    return int(any(result != "passed" for result, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
