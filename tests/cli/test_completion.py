"""Shell completion, as a shell calls it: the script, then candidates for the typed words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagemill.__main__ import app
from tests.conftest import ROOT

START = "import sys; sys.argv[0] = 'pagemill'; from pagemill.__main__ import main; main()"


def pagemill(**variables: str) -> str:
    """Return the program's output for a shell that calls it with these variables."""
    result: str = CliRunner().invoke(app, [], env=variables, prog_name="pagemill").stdout
    return result


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _pagemill_completion pagemill"),
        ("zsh", "compdef _pagemill_completion pagemill"),
        ("fish", "complete --command pagemill"),
    ],
)
def test_the_script_registers_the_command(shell: str, registers: str) -> None:
    assert registers in pagemill(_PAGEMILL_COMPLETE=f"source_{shell}")


def test_words_for_zsh() -> None:
    assert '"resume"' in pagemill(_PAGEMILL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="pagemill queue re")


@pytest.mark.slow
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    program = tmp_path / "pagemill"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -c "{START}"\n')
    program.chmod(0o755)
    typed = """
        eval "$(_PAGEMILL_COMPLETE=source_bash pagemill)"
        complete -p pagemill
        COMP_WORDS=(pagemill cel); COMP_CWORD=1; _pagemill_completion pagemill; echo "${COMPREPLY[@]}"
        COMP_WORDS=(pagemill run --js); COMP_CWORD=2; _pagemill_completion pagemill; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        [bash, "--norc", "-c", typed], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    registered, commands, options = done.stdout.splitlines()
    assert "_pagemill_completion" in registered
    assert commands.split() == ["celery-worker", "celery-relay"]
    assert set(options.split()) == {"--json", "--json-schema"}
