"""Files that may be compressed: .gz by the standard library, .zst by pyarrow."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from pagemill.producer.dataset.errors import DatasetError

COMPRESSED = (".gz", ".zst")
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


def data_suffix(path: Path) -> str:
    """Return the suffix that tells the format, in lower case: `.csv` of `rows.csv.gz`."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in COMPRESSED else suffix


def compression(path: Path) -> str | None:
    """Return `.gz`, `.zst`, or None for a file that is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else None


def compression_of(start: bytes) -> str:
    """Return the suffix for data that begins so; "" if it is not compressed."""
    return next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading what it holds. Raises DatasetError if it cannot be decompressed."""
    kind = compression(path)
    if kind is None:
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path, "rb") if kind == ".gz" else _open_zst(path, "rb") as file:
            yield cast("IO[bytes]", file)
    except (EOFError, OSError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


@contextmanager
def writing(path: Path, kind: str | None) -> Iterator[IO[bytes]]:
    """Open a file for writing, compressed as `kind` says; at the end it is on disk."""
    with path.open("wb") as raw:
        if kind is None:
            yield raw
        elif kind == ".gz":
            # Without a name and a time, equal rows are equal files.
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
                yield cast("IO[bytes]", file)
        else:
            with _open_zst(path, "wb") as file:
                yield file
        raw.flush()
        os.fsync(raw.fileno())


def check_supported(path: Path) -> None:
    """Raise DatasetError for a .zst file without pyarrow."""
    if compression(path) == ".zst" and importlib.util.find_spec("pyarrow") is None:
        raise DatasetError(".zst files need pyarrow: pip install 'pagemill[parquet]'")


def _open_zst(path: Path, mode: str) -> IO[bytes]:
    import pyarrow

    if mode == "wb":
        return cast("IO[bytes]", io.BufferedWriter(pyarrow.output_stream(str(path), compression="zstd")))
    return cast("IO[bytes]", io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
