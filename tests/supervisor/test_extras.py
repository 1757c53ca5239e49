"""`pagemill up` without a package names the extras that its own children need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagemill.__main__ import app


@pytest.mark.parametrize(
    ("flags", "extras"),
    [
        (("--model", "echo"), "[echo,gateway]"),
        (("--model", "echo:20:name", "--no-gateway"), "[echo]"),
        (("--model", "smollm2"), "[worker,gateway]"),
        (("--config", "up.toml"), "[echo]"),
    ],
)
def test_the_extras_are_those_of_the_model(
    flags: tuple[str, ...], extras: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "up.toml").write_text('model = "echo"\ngateway = false\n')
    monkeypatch.setitem(sys.modules, "filelock", None)  # as if it were not installed
    for name in ("pagemill.supervisor.run_directory", "pagemill.worker.embedded"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    done = CliRunner().invoke(app, ["up", *flags], env={"PAGEMILL_STATE_DIR": str(tmp_path)})
    assert done.exit_code == 2
    assert f"filelock is missing; `pagemill up` needs: pip install 'pagemill{extras}'" in done.stderr
