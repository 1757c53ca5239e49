"""Files that may be compressed: .gz by the standard library, .zst by pyarrow."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, cast

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.tables.streams import Stream

COMPRESSED = (".gz", ".zst")
_MAGIC = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", ".zst"),
    b"BZh9": ("bzip2", ""),
    b"\xfd7zX": ("xz", ""),
    b"PK\x03\x04": ("ZIP or Excel", ""),
}


def data_suffix(file: PurePath | Stream) -> str:
    """Return the suffix that names the format, in lower case: `.csv` of `rows.csv.gz`."""
    path = _path_of(file)
    return path.with_suffix("").suffix.lower() if compression(path) else path.suffix.lower()


def compression(file: PurePath | Stream) -> str | None:
    """Return `.gz`, `.zst`, or None for uncompressed files."""
    suffix = _path_of(file).suffix.lower()
    return suffix if suffix in COMPRESSED else None


def _path_of(file: PurePath | Stream) -> PurePath:
    return file.path if isinstance(file, Stream) else file


def compression_of(start: bytes) -> tuple[str, str]:
    """Return name and suffix of the compression of data with this start; no suffix: not supported, no name: none."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), ("", ""))


@contextmanager
def reading(file: Path | Stream) -> Iterator[IO[bytes]]:
    """Open a file to read its decompressed contents. Raises DatasetError if it cannot be decompressed."""
    kind = compression(file)
    try:
        opened = file.open("rb")
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}") from error
    with opened as raw:
        if kind is None:
            yield raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) if kind == ".gz" else _open_zst(raw) as unpacked:
                yield cast("IO[bytes]", unpacked)
        except (EOFError, OSError, zlib.error) as error:
            raise DatasetError(f"{file} cannot be read: {error}") from error


@contextmanager
def writing(path: Path, kind: str | None) -> Iterator[IO[bytes]]:
    """Open a file for writing, compressed according to `kind`; at the end it is on disk."""
    with path.open("wb") as raw:
        if kind is None:
            yield raw
        elif kind == ".gz":
            # Without a name and a time, equal rows result in equal files.
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
                yield cast("IO[bytes]", file)
        else:
            import pyarrow

            with io.BufferedWriter(pyarrow.output_stream(str(path), compression="zstd")) as file:
                yield cast("IO[bytes]", file)
        raw.flush()
        os.fsync(raw.fileno())


def check_supported(file: PurePath | Stream) -> None:
    """Raise DatasetError for a .zst file without pyarrow."""
    if compression(file) == ".zst" and importlib.util.find_spec("pyarrow") is None:
        raise DatasetError(".zst files need pyarrow: pip install 'pagemill[parquet]'")


def _open_zst(raw: IO[bytes]) -> IO[bytes]:
    import pyarrow

    return cast("IO[bytes]", io.BufferedReader(pyarrow.input_stream(raw, compression="zstd")))
