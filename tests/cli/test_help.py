"""`--help` of every command: a list in which each has its sentence, and a word on every option."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from pagemill.__main__ import app


def commands(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command and group, with the words that name it."""
    command = get_command(app) if command is None else command
    found = [(path, command)]
    for name, below in getattr(command, "commands", {}).items():
        found += commands(below, (*path, name))
    return found


COMMANDS = {" ".join(("pagemill", *path)): (path, command) for path, command in commands()}


def shown(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="pagemill", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", [name for name in COMMANDS if hasattr(COMMANDS[name][1], "commands")])
def test_a_list_of_commands_cuts_no_sentence_off(name: str) -> None:
    listed = shown(COMMANDS[name][0]).partition("Commands:")[2]
    assert "..." not in listed, listed


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"pagemill {version('pagemill')}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    path, command = COMMANDS[name]
    silent = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert not silent, silent
    usage = shown(path).splitlines()[0]
    assert not re.search(r"\]\.\.\.\]\.\.\.|\{[a-z]", usage), usage
