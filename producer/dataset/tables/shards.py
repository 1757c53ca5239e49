"""Several files as one source of rows: a list of files, a directory, or a glob pattern.

The files are read sequentially, each row once. Their columns are compared before a run submits anything.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from pagemill.common.json_values import is_unicode
from pagemill.producer.dataset.errors import DatasetError, EmptyFile
from pagemill.producer.dataset.tables.compressed import data_suffix
from pagemill.producer.dataset.tables.picture_folder import PictureFolder, is_picture
from pagemill.producer.dataset.tables.places import local_path, uri_of
from pagemill.producer.dataset.tables.rows import (
    SUFFIXES,
    ArrowSource,
    CsvOptions,
    CsvSource,
    Format,
    Row,
    Source,
    open_source,
)

SAMPLED_ROWS = 100
"""Rows of a file whose columns are compared with those of other files, and with those that the run needs."""
FINGERPRINT_BYTES = 64 << 10
MAX_FILES = 100_000
_DATASET_FILES = ("state.json", "dataset_dict.json")
"""Files that `datasets` writes into a directory, which is then one data set."""

Columns = Mapping[str, frozenset[str]]
"""The columns of a file and the kinds of their values; none if all are null."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a source. `name`: its path relative to the folder that the files have in common."""

    name: str
    path: Path
    source: Source


class ShardedSource:
    """The rows of several files. `Row.number` counts over all files, `Row.shard_row` within one."""

    def __init__(self, shards: Sequence[Shard], name: str, given: Sequence[Path] = ()) -> None:
        """`given`: the directories and patterns that the files were found with."""
        self.name = name
        self.shards = shards
        self._given = given

    def covers(self, path: Path) -> bool:
        """Return whether a path is one of the files, or would be found as one of the source's files."""
        name = os.path.abspath(path)
        return any(name == os.path.abspath(shard.path) for shard in self.shards) or any(
            os.path.commonpath([name, root := os.path.abspath(one)]) == root or fnmatch.fnmatch(name, root)
            for one in self._given
        )

    def rows(self) -> Iterator[Row]:
        number = 0
        for index in range(len(self.shards)):
            for row in self.rows_of(index):
                number += 1
                yield Row(number, row.fields, row.error, index, row.number)

    def rows_of(self, index: int) -> Iterator[Row]:
        """Yield the rows of one file as it counts them. An empty CSV file has none."""
        try:
            yield from self.shards[index].source.rows()
        except EmptyFile:
            return

    def count(self) -> int | None:
        """Return the number of rows in all files."""
        total = 0
        for shard in self.shards:
            try:
                count = shard.source.count()
            except EmptyFile:
                continue
            if count is None:
                return None
            total += count
        return total

    def check_columns(self) -> None:
        """Raise DatasetError, naming file and column, if two files differ in their columns or these columns' types.

        All files except JSONL must have the columns of the others. JSONL objects may omit a key, so only the kinds of
        values in the first rows are compared.
        """
        known: dict[str, tuple[str, frozenset[str]]] = {}
        first = ""
        for shard in self.shards:
            columns = _columns(shard.source)
            if columns is None:
                continue
            if first and isinstance(shard.source, ArrowSource | CsvSource):
                _check_names(shard.path, columns.keys(), first, known.keys())
            for name, kinds in columns.items():
                _, before = known.get(name, ("", frozenset[str]()))
                if kinds and before and not kinds & before:
                    raise DatasetError(
                        f"{shard.path}: column {name!r} holds {_listed(kinds)}, and {_listed(before)} in "
                        f"{known[name][0]}; convert one of them, or run them separately"
                    )
                if name not in known or not before:
                    known[name] = str(shard.path), kinds
            first = first or str(shard.path)

    def fingerprints(self) -> list[list[Any]]:
        """Return each file's name, size, and a hash of its first and last 64 KiB, to detect changed files."""
        return [[shard.name, *_fingerprint(shard.path)] for shard in self.shards]


def joined_lines(source: Source) -> Iterator[str]:
    """Yield a notice about each file that has been read and has rows of several lines."""
    for one in [shard.source for shard in source.shards] if isinstance(source, ShardedSource) else [source]:
        if isinstance(one, CsvSource) and one.joined.count:
            yield f"{one.name}: {one.joined}"


def changed_files(then: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str:
    """Return a description of the differences of two lists of fingerprints; empty if they are equal."""
    before, after = ({name: about for name, *about in each} for each in (then, now))
    groups = {
        "missing": [name for name in before if name not in after],
        "added": [name for name in after if name not in before],
        "changed": [name for name, about in after.items() if before.get(name, about) != about],
    }
    parts = [f"{word}: {_some(names)}" for word, names in groups.items() if names]
    if not parts and list(before) != list(after):
        parts = ["another order of the files"]
    return "; ".join(parts)


def is_glob(path: str | Path) -> bool:
    """Return whether a path is a pattern instead of the name of an existing file."""
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def is_sharded(paths: Sequence[str | Path]) -> bool:
    """Return whether these are several files, a pattern, or a directory that is not a Hugging Face data set."""
    if len(paths) != 1:
        return True
    path = local_path(paths[0])
    return is_glob(path) or (path.is_dir() and not any((path / name).exists() for name in _DATASET_FILES))


def open_rows(
    paths: Sequence[str | Path],
    kind: Format | None = None,
    encoding: str = "utf-8",
    **options: Unpack[CsvOptions],
) -> Source:
    """Return the source for one file or Hugging Face data set, or for several files. Raises DatasetError."""
    if is_sharded(paths):
        if len(paths) == 1 and kind is None and is_picture_folder(local_path(paths[0])):
            return PictureFolder(local_path(paths[0]))
        return open_shards(paths, kind, encoding, **options)
    return open_source(local_path(paths[0]), kind, encoding, **options)


def open_shards(
    paths: Sequence[str | Path],
    kind: Format | None = None,
    encoding: str = "utf-8",
    **options: Unpack[CsvOptions],
) -> ShardedSource:
    """Return the files of directories, patterns and paths as one source.

    Args:
        paths: Read in this order; the files of a directory (searched with its folders) or a pattern by name.
        kind: The format of all files; by default determined by their suffixes.
        encoding: Of text files.
        **options: Of CSV and TSV files.

    Raises:
        DatasetError: there is no such file, a file is named twice, or their formats differ.
    """
    found = [path for given in paths for path in _expanded(given, kind)]
    if len(found) > MAX_FILES:
        raise DatasetError(f"these are {len(found):,} files; a run reads at most {MAX_FILES:,}")
    if odd := next((path for path in found if not is_unicode(str(path))), None):
        raise DatasetError(f"{str(odd)!a}: the file's name is not UTF-8 text; rename the file")
    twice = [path for path, count in Counter(map(os.path.abspath, found)).items() if count > 1]
    if twice:
        raise DatasetError(f"{twice[0]} is named twice; name each file once")
    formats = {kind or SUFFIXES.get(data_suffix(path)): path for path in reversed(found)}
    if len(formats) > 1:
        one, other, *_ = sorted(map(str, formats.values()))
        raise DatasetError(f"{one} and {other} have different formats; run them separately")
    common = os.path.commonpath([os.path.abspath(path.parent) for path in found])
    shards = [
        Shard(
            os.path.relpath(os.path.abspath(path), common), path, open_source(path, kind, encoding, **options)
        )
        for path in found
    ]
    name = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
    return ShardedSource(shards, name, [local_path(path) for path in paths])


def is_picture_folder(path: Path) -> bool:
    """Return whether a directory contains images, and no files of rows."""
    if not path.is_dir():
        return False
    names = [name for _, _, files in os.walk(path) for name in files if not _is_hidden(Path(name))]
    has_rows = any(data_suffix(Path(name)) in SUFFIXES for name in names)
    return not has_rows and any(map(is_picture, names))


def _expanded(given: str | Path, kind: Format | None) -> list[Path]:
    if str(given) == "-" or uri_of(given) is not None:
        raise DatasetError(f"{given} cannot be read with other files, nor as a pattern; run it separately")
    path = local_path(given)
    if path.is_dir():
        files = sorted(
            one for one in path.rglob("*") if not _is_hidden(one.relative_to(path)) and one.is_file()
        )
        rows = [one for one in files if kind is not None or data_suffix(one) in SUFFIXES]
        if not rows:
            raise DatasetError(
                f"{path} holds no files of rows ({', '.join(SUFFIXES)}), nor is it a Hugging Face dataset "
                "directory (it has no state.json)"
            )
        return rows
    if is_glob(path):
        matches = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
        if not (files := [one for one in matches if one.is_file()]):
            raise DatasetError(f"{path}: no file matches")
        return files
    return [path]


def _is_hidden(path: Path) -> bool:
    """Return whether tools that read directories ignore a file, such as Spark's `_SUCCESS`."""
    return any(part.startswith((".", "_")) for part in path.parts)


def _check_names(path: Path, names: Any, first: str, known: Any) -> None:
    if missing := [name for name in known if name not in names]:
        raise DatasetError(f"{path} has no column {missing[0]!r}, which {first} has; run it separately")
    if more := [name for name in names if name not in known]:
        raise DatasetError(f"{path} has a column {more[0]!r}, which {first} lacks; run it separately")


def _columns(source: Source) -> Columns | None:
    """Return the columns of a file; None for one that has neither rows nor a list of columns."""
    if isinstance(source, ArrowSource):
        return {field.name: _arrow_kinds(field.type) for field in source.schema()}
    if isinstance(source, CsvSource):
        try:
            return dict.fromkeys(source.header(), frozenset({"text"}))
        except EmptyFile:
            return None
    columns: dict[str, frozenset[str]] = {}
    for row in islice(source.rows(), SAMPLED_ROWS):
        for name, value in (row.fields or {}).items():
            columns[name] = columns.get(name, frozenset()) | _json_kinds(value)
    return columns or None


_JSON_KINDS = {
    bool: "true or false", int: "numbers", float: "numbers", str: "text", list: "lists", dict: "objects",
}  # fmt: skip


def _json_kinds(value: Any) -> frozenset[str]:
    return frozenset() if value is None else frozenset({_JSON_KINDS[type(value)]})


def _arrow_kinds(kind: Any) -> frozenset[str]:
    """Return the kind of a column's values in rows, regardless of width and encoding."""
    from pyarrow import types

    if types.is_null(kind):
        return frozenset()
    if types.is_dictionary(kind):
        return _arrow_kinds(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return frozenset({f"lists of {inner}" for inner in _arrow_kinds(kind.value_type)} or {"lists"})
    tests = {
        "true or false": types.is_boolean,
        "whole numbers": types.is_integer,
        "numbers with a fraction": types.is_floating,
        "decimal numbers": types.is_decimal,
        "text": lambda one: types.is_string(one) or types.is_large_string(one),
        "bytes": lambda one: types.is_binary(one) or types.is_large_binary(one),
        "times": types.is_timestamp,
        "dates": types.is_date,
        "times of day": types.is_time,
        "durations": types.is_duration,
        "objects": types.is_struct,
    }
    return frozenset({next((name for name, is_kind in tests.items() if is_kind(kind)), str(kind))})


def _fingerprint(path: Path) -> tuple[int, str]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(FINGERPRINT_BYTES, size - FINGERPRINT_BYTES))
        digest.update(file.read(FINGERPRINT_BYTES))
    return size, digest.hexdigest()


def _listed(kinds: frozenset[str]) -> str:
    return " or ".join(sorted(kinds))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
