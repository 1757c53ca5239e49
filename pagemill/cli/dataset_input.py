"""What `pagemill run` reads: a recipe, perhaps, and rows."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path, PurePath
from typing import Unpack

import typer

from pagemill.producer.dataset.steps.recipe_file import SUFFIXES
from pagemill.producer.dataset.tables.compressed import compression_of
from pagemill.producer.dataset.tables.places import open_stream, uri_of
from pagemill.producer.dataset.tables.rows import CsvOptions, Format, Source, open_source
from pagemill.producer.dataset.tables.shards import open_rows
from pagemill.producer.dataset.tables.streams import Stream


def recipe_and_rows(flags: list[Path]) -> tuple[Path | None, list[Path]]:
    """Return the recipe's file, if there is one, and the files of rows. Raises BadParameter."""
    recipes = [path for path in flags if path.suffix in SUFFIXES]
    rows = flags[len(recipes) :]
    if not rows or recipes not in ([], flags[:1]):
        raise typer.BadParameter(
            "one or more files of rows are required, after a recipe (.yaml) if there is one: [RECIPE.yaml] IN..."
        )
    return (recipes[0] if recipes else None), rows


def source_of_rows(
    paths: list[Path],
    inputs: contextlib.ExitStack,
    kind: Format | None,
    encoding: str,
    **options: Unpack[CsvOptions],
) -> Source:
    """Open the input. Standard input and server responses are stored in a file, since rows are read twice."""
    path, *others = paths
    if others:
        return open_rows(paths, kind, encoding, **options)
    if (uri := uri_of(path)) is not None:
        return open_source(inputs.enter_context(open_stream(uri)), kind, encoding, **options)
    if str(path) != "-":
        try:
            return open_rows([path], kind, encoding, **options)
        except OSError as error:
            raise typer.BadParameter(f"{str(path)[:100]}: {error.strerror}") from None
    start = sys.stdin.buffer.read(4)
    named = PurePath(f"rows.{kind or 'jsonl'}{compression_of(start)[1]}")
    stream = Stream(sys.stdin.buffer, named, "standard input", start)
    return open_source(inputs.enter_context(contextlib.closing(stream)), kind, encoding, **options)
