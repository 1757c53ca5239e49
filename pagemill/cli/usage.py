"""`pagemill usage`: the ledger as a table, JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from pagemill.cli.app import Report, app, print_stderr
from pagemill.cli.terminal.options import Options
from pagemill.producer.wire.calls.metering.usage import COLUMNS, GROUPS
from pagemill.producer.wire.schema import keys

Rows = Sequence[dict[str, Any]]


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a day, such as 2026-01-31") from None


def _fields(text: str | None) -> str | None:
    for name in text.split(",") if text is not None else ():
        if name not in GROUPS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(GROUPS)}")
    return text


def _destination(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in WRITERS:
        raise typer.BadParameter(f"should end in {', '.join(WRITERS)}")
    return path


class UsageOptions(Options):
    since: Annotated[date | None, typer.Option(parser=_day, metavar="DAY")] = None
    """First day (UTC)."""
    until: Annotated[date | None, typer.Option(parser=_day, metavar="DAY")] = None
    """Last day (UTC)."""
    tenant: keys.TenantName | None = None
    """Tenant. Default: all."""
    model: keys.ModelName | None = None
    """Model, including its adapters. Default: all."""
    by: Annotated[str, typer.Option(callback=_fields, metavar="FIELDS")] = ",".join(GROUPS)
    """Fields to group by."""
    out: Annotated[Path | None, typer.Option(callback=_destination)] = None
    """Write a .csv, .parquet or .json file."""


@app.command()
def usage(flags: UsageOptions, at: Report) -> None:
    """Print the tokens, seconds and jobs of tenants."""
    groups, out = flags.by.split(","), flags.out
    with at.producer() as producer:
        found = producer.usage(
            since=flags.since, until=flags.until, tenant=flags.tenant, model=flags.model, by=groups
        )
    columns = [name for name in COLUMNS if name in groups or name not in GROUPS]
    rows = [{name: value for name, value in asdict(row).items() if name in columns} for row in found]
    if out is not None:
        _write(out, columns, rows)
        print_stderr(f"{len(rows)} rows in {out}")
        return
    none = f"no job of queue {at.queue} has ended on these days"
    at.print(rows, [tuple(row.values()) for row in rows], columns, none=none)


def _write(path: Path, columns: Sequence[str], rows: Rows) -> None:
    """Write the file atomically."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pagemill-") as directory:
            temporary = Path(directory) / path.name
            WRITERS[path.suffix](temporary, columns, rows)
            os.replace(temporary, path)
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be written: {error.strerror or error}") from None


def _write_csv(path: Path, columns: Sequence[str], rows: Rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, columns: Sequence[str], rows: Rows) -> None:
    path.write_text(json.dumps(list(rows)) + "\n", encoding="utf-8")


def _write_parquet(path: Path, columns: Sequence[str], rows: Rows) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise typer.BadParameter("Parquet needs pyarrow: pip install 'pagemill[parquet]'") from None
    kinds = {name: pyarrow.string() for name in GROUPS} | {"device_s": pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in columns])
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


WRITERS: dict[str, Callable[[Path, Sequence[str], Rows], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".json": _write_json,
}
