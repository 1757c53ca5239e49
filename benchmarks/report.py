"""The shared parts of benchmark commands: arguments, the model, tables, and the file of results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine

if TYPE_CHECKING:  # a GPU machine might not have it
    from rich.console import Console
    from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None, *, model: bool = True) -> argparse.ArgumentParser:
    """Return a parser with `--out` and, unless the command defines it, `--model`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if model:
        made.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    made.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    return made


@dataclass
class Report:
    """A file of results: the question, the time, the machine, the command's options, and measurements."""

    name: str
    question: str
    options: argparse.Namespace
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    machine: dict[str, Any] = field(default_factory=machine.describe)

    def __post_init__(self) -> None:
        if machine.is_busy():
            print("this machine is busy: the figures will be wrong, and ratios doubtful", file=sys.stderr)

    @property
    def path(self) -> Path:
        """Return the specified path, or a dated one among the results."""
        dated = RESULTS / f"{self.name}-{self.started:%Y%m%dT%H%M%SZ}.json"
        return Path(self.options.out) if self.options.out else dated

    def write(self, figures: dict[str, Any]) -> None:
        """Write the file with these results."""
        head = {
            "question": self.question,
            "date": self.started.isoformat(timespec="seconds"),
            "machine": self.machine,
            "settings": {name: value for name, value in vars(self.options).items() if name != "out"},
        }
        write(self.path, head | figures)


def write(path: Path, figures: dict[str, Any]) -> None:
    """Replace the file atomically: readers and aborted runs never leave or see a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(figures, indent=2, default=str) + "\n")
    partial.replace(path)


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


def table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Return an empty table; the columns called `figures` are aligned to the right."""
    from rich.table import Table

    made = Table(title=title)
    for name in names:
        made.add_column(name)
    for name in figures:
        made.add_column(name, justify="right")
    return made


def model_directory(model: str) -> Path:
    """Return the directory of a model named on a command line, which every engine reads; one of a hub is downloaded."""
    from benchmarks.dense import dense_directory
    from pagemill.engine.errors import EngineError
    from pagemill.engine.models.directory import obtain_model

    try:
        return dense_directory(obtain_model(model, print).directory)
    except EngineError as error:
        raise SystemExit(f"--model {model}: {error}") from None


def config_of(directory: Path) -> dict[str, Any]:
    """Return the model's config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
