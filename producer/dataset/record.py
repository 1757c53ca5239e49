"""The record of a run: the settings of its output, and the time and KV use of all its starts.

During the run it is in the journal; next to a finished OUT it is OUT.run.json, so that a later run can compare its
settings and add its own time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagemill.producer.dataset.errors import DatasetError

VERSION = 1
MAX_SHOWN = 60
"""Maximum characters of a setting in a message."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be continued later."""

    count: int = 0
    total: float = 0.0

    def plus(self, other: Mean) -> Mean:
        return Mean(self.count + other.count, self.total + other.total)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the starts of a run. Raises ValueError, TypeError or KeyError for data that no run has written."""

    seconds: float = 0.0
    starts: int = 0
    kv_utilization: Mean = Mean()
    kv_waste: Mean = Mean()
    untimed_rows: int = 0
    """Rows taken from an output without a record: their time is unknown, so rates do not count them."""
    untimed_tokens: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Totals:
        means = {name: Mean(**fields[name]) for name in ("kv_utilization", "kv_waste")}
        return cls(**{**fields, **means})


@dataclass(frozen=True, slots=True)
class Record:
    """`settings`: everything that an output depends on except the rows. `rows`: the number in the last run."""

    settings: dict[str, Any]
    totals: Totals
    rows: int = 0
    version: int = field(default=VERSION, kw_only=True)

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(
                json.dumps(asdict(self), ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Return the record, None if there is none. Raises DatasetError."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["version"] != VERSION or not isinstance(fields["settings"], dict):
                raise ValueError
            return cls(fields["settings"], Totals.from_fields(fields["totals"]), int(fields["rows"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            raise DatasetError(
                f"{path} is not the record of a run; move it away, or start over with --overwrite"
            ) from None


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a description of the settings that differ; empty if there are none."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return "; ".join(
        f"{name}: {_format(then.get(name))} then, {_format(now.get(name))} now" for name in names
    )


def _format(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
