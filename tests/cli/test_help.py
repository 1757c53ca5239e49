"""`--help` of every command: a list with a sentence for each, a text on every option; and commands in pages."""

from __future__ import annotations

import re
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from pagemill.__main__ import app
from tests.conftest import ROOT


def commands(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command and group, with its words."""
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


IN_CODE = re.compile(r"(?:`|^ {4}|^)pagemill ([a-z][^`|;&>#\n]*)", re.MULTILINE)
PAGES = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "CHANGELOG.md"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_a_page_are_taken(page: Path) -> None:
    wrong = []
    for text in IN_CODE.findall(page.read_text()):
        words = text.split()
        path = [*takewhile(re.compile("[a-z][a-z-]*").fullmatch, words)]
        while " ".join(("pagemill", *path)) not in COMMANDS:
            path.pop()
        command = COMMANDS[" ".join(("pagemill", *path))][1]
        taken = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
        wrong += [(text, flag) for flag in re.findall(r"(?<!\S)--[a-z-]+", text) if flag not in taken]
        if hasattr(command, "commands"):
            wrong += [(text, word) for word in words[len(path) : len(path) + 1] if word[0].isalpha()]
    assert not wrong
