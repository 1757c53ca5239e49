"""The conditions of `make shake` match their names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import shake
from tests.conftest import ROOT

PROBE = """
import json, os, time
print(json.dumps({"date": time.time(), "uptime": time.monotonic(), "cores": len(os.sched_getaffinity(0)),
  "zone": time.tzname[0], "home": os.listdir(os.environ["HOME"])}))
"""


def _probe(setup: shake.Setup) -> dict[str, Any]:
    """Return the observations of a program that runs like the tests."""
    prefix = setup.command[: -len(shake.TESTS)] if setup.command[-len(shake.TESTS) :] == shake.TESTS else ()
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PROBE],
        env=os.environ | setup.environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return _probe(shake.Setup())


def _seen(name: str) -> dict[str, Any]:
    try:
        with shake.CONDITIONS[name]() as setup:
            return _probe(setup)
    except shake.UnavailableError as error:
        pytest.skip(str(error))


def test_one_core() -> None:
    assert _seen("one-core")["cores"] == 1


@pytest.mark.parametrize(("name", "seconds"), [("uptime-8h", 30_000), ("uptime-12d", 1_000_000)])
def test_uptime(name: str, seconds: int, usual: dict[str, Any]) -> None:
    seen = _seen(name)
    # In the first namespace: these tests may themselves run in one of make shake.
    usual_uptime = usual["uptime"] - _monotonic_offset()
    assert 0 <= seen["uptime"] - usual_uptime - seconds < 600
    assert 0 <= seen["date"] - usual["date"] < 600


def _monotonic_offset() -> int:
    """Return by how many seconds this process's time namespace shifts the monotonic clock."""
    offsets = dict(
        line.split(maxsplit=1) for line in Path("/proc/self/timens_offsets").read_text().splitlines()
    )
    return int(offsets["monotonic"].split()[0])


shifted = pytest.mark.skipif(
    "CLOCK_SHIFT_S" in os.environ, reason="this clock is shifted, by make shake itself"
)


@shifted
def test_date(usual: dict[str, Any]) -> None:
    seen = _seen("date-40d")
    assert 0 <= seen["date"] - usual["date"] - 40 * 24 * 3600 < 600
    assert 0 <= seen["uptime"] - usual["uptime"] < 600


@shifted
def test_leap_day() -> None:
    """Noon of 2028-02-29 UTC, in seconds since 1970."""
    assert abs(_seen("leap-day")["date"] - 1_835_438_400) < 600


def test_locale() -> None:
    assert _seen("locale")["zone"] == "+14"


def test_empty_home() -> None:
    assert _seen("empty-home")["home"] == []


def test_busy_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*arguments))
        return started[-1]

    monkeypatch.setattr(shake, "subprocess", SimpleNamespace(Popen=start))
    with shake.CONDITIONS["busy"]():
        assert [loop.poll() for loop in started] == [None, None]
    assert [loop.poll() for loop in started] == [-signal.SIGKILL] * 2


def test_busy_loops_end_with_a_killed_run() -> None:
    program = "from tests import shake\nwith shake.CONDITIONS['busy'](): print('busy', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "busy\n"
        loops = psutil.Process(run.pid).children()
        assert len(loops) == 2
        run.kill()
        assert psutil.wait_procs(loops, timeout=120)[1] == []


def test_a_condition_that_is_unavailable_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shake.shutil, "which", lambda _: None)
    assert shake.main(["one-core"]) == 1
    assert "FAILED: taskset is missing; install the package util-linux" in capsys.readouterr().out


def test_an_unknown_condition_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shake.main(["calm"])
    assert "unknown condition calm; choose from busy, one-core" in capsys.readouterr().err
