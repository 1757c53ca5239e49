"""Classes of options: what a command's parameters are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.testing import CliRunner

from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options, grouped


class Shared(Options):
    level: Literal["low", "high"] = "low"
    """low or high."""


class Changed(Shared):
    level: Literal["low", "high"] = "high"


class Many(Options):
    source: Annotated[Path, typer.Argument(metavar="IN")]
    """What is read,
    from a file."""
    share: Annotated[float | None, between(0.0, 1.0)] = None
    """A share."""
    shared: Changed
    shares: Annotated[list[Literal["a", "b"]] | None, typer.Option("--part")] = None
    """A part; may be repeated."""
    num_rows: Annotated[int, between(1, 9)] = 3
    """Rows."""


@dataclass
class Target:
    share: float | None
    num_rows: int
    other: str = ""


def invoke(*words: str) -> tuple[Any, Any]:
    app, found = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @grouped
    def command(flags: Many) -> None:
        found.append(flags)

    return CliRunner().invoke(app, words), found[0] if found else None


def test_fields_become_options_in_their_order() -> None:
    shown = invoke("--help")[0].stdout
    assert "What is read, from a file." in shown
    positions = [shown.index(flag) for flag in ("--share", "--level", "--part", "--num-rows")]
    assert positions == sorted(positions)
    assert "low or high.  [default: high]" in shown, "an overridden field keeps its docstring"
    assert "[default: 3; 1<=x<=9]" in shown


def test_a_command_receives_its_options() -> None:
    _, flags = invoke("in.csv", "--part", "a", "--part", "b", "--share", "0.5")
    assert (flags.source, flags.shares, flags.share) == (Path("in.csv"), ["a", "b"], 0.5)
    assert flags.shared.level == "high"
    assert Target(**flags.fields_of(Target)) == Target(0.5, 3)


def test_annotations_validate() -> None:
    for bad in (("--share", "nan"), ("--share", "2"), ("--num-rows", "0"), ("--level", "x"), ("--part", "c")):
        assert invoke("in.csv", *bad)[0].exit_code == 2, bad
