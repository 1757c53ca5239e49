"""deploy/systemd: units that systemd accepts, whose settings the commands support."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.supervisor.layout import timeouts
from pagemill.supervisor.settings import UpSettings
from pagemill.worker.config import ENV_PREFIX, WorkerConfig
from tests.conftest import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def installed(unit: Path, folder: Path) -> Path:
    """The unit as installed with /opt/pagemill and its user: systemd checks both."""
    python = sys.executable.replace("%", "%%")
    text = unit.read_text().replace("/opt/pagemill/bin/pagemill", f'"{python}" -m pagemill')
    text = re.sub(r"^(User|Group)=pagemill$", r"\1=root", text, flags=re.MULTILINE)
    target = folder / unit.name.replace("@.", "@9790.")
    target.write_text(text)
    return target


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_it(unit: Path, tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    command = [verify, "verify", "--man=no", "--recursive-errors=no", str(installed(unit, tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    about = [line for line in done.stderr.splitlines() if "pagemill" in line]
    assert done.returncode == 0, done.stderr
    assert about == []


def test_a_wrong_line_is_noticed(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    unit = installed(UNITS[0], tmp_path)
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=when-it-likes"))
    command = [verify, "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "when-it-likes" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_knows_its_options(unit: Path) -> None:
    (start,) = re.findall(
        r"^ExecStart=/opt/pagemill/bin/pagemill (\w+) (.*)$", unit.read_text(), re.MULTILINE
    )
    command = [sys.executable, "-m", "pagemill", start[0], "--help"]
    shown = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env={"COLUMNS": "200"}
    ).stdout
    assert [option for option in re.findall(r"--[\w-]+", start[1]) if option not in shown] == []


def test_its_times_leave_the_worker_its_own() -> None:
    unit = (ROOT / "deploy" / "systemd" / "pagemill-worker@.service").read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > WorkerConfig.model_fields["shutdown_s"].default
    for name in re.findall(rf"{ENV_PREFIX}(\w+_S)\b", unit):
        assert name.lower() in WorkerConfig.model_fields


def test_the_supervisors_file_is_one_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    settings = UpSettings.load(ROOT / "deploy" / "systemd" / "up.toml", {}, {})
    assert settings.devices == "all"
    assert set(settings.worker) <= set(WorkerConfig.model_fields)
    unit = (ROOT / "deploy" / "systemd" / "pagemill-up.service").read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > timeouts(settings).stop_s
