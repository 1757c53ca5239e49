"""Settings of a worker's process that must exist before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagemill.engine.config import EngineConfig
from pagemill.worker.engine_host.loop import load
from pagemill.worker.interpreter import SPIN_COUNT, spin_briefly


def test_loading_an_engine_shortens_the_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # settings made in the test are undone after it
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    load(EngineConfig(model="echo")).close()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv(name, "passive")
    spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == ("passive" if name == "GOMP_SPINCOUNT" else None)


@pytest.mark.slow
def test_a_worker_imports_no_torch_before() -> None:
    """The runtime reads it once, when torch loads it."""
    code = "import sys, pagemill.worker.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
