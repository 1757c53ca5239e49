"""Locations of inputs and outputs: files, or URIs (`s3://bucket/rows.jsonl`) by fsspec.

An object store replaces objects atomically and does not support appends or renames. So a run's journal is a file on
this machine, and its outputs are created here and copied when they are complete. An object next to OUT, `OUT.partial`,
shows that a run is in progress, and where its journal is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from pagemill.producer.dataset.errors import DatasetError, DiskError
from pagemill.producer.dataset.tables.streams import CHUNK_BYTES, Stream
from pagemill.producer.wire.server.discovery import state_dir

_URI = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}")
READ_AHEAD_BYTES = 8 * CHUNK_BYTES
_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Extras of Pagemill by protocol; for others fsspec reports the package to install."""


def uri_of(given: str | Path) -> str | None:
    """Return the URI, None for a path. A URI with a single slash, from a conversion to a path, is repaired."""
    found = _URI.match(str(given))
    if found is None or os.path.lexists(given):
        return None
    rest = str(given)[found.end() :]
    if found[1] == "file":
        return None
    return f"{found[1]}://{rest}"


def local_path(given: str | Path) -> Path:
    """Return the path of a plain path or of a file URI."""
    found = re.fullmatch(r"file:/{1,3}(?=[^/])(.*)", str(given))
    return Path(given) if found is None else Path("/" + unquote(found[1]))


def redacted(uri: str) -> str:
    """Return a URI without possible secrets: user, password, query."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    secret = "***@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{secret}{host}{parts.path}{'?***' if parts.query else ''}"


@contextlib.contextmanager
def open_stream(uri: str) -> Iterator[Stream]:
    """Open the object of a URI as a stream. Raises DatasetError."""
    fs, path = _filesystem(uri)
    with _library_errors(f"{redacted(uri)} cannot be read"):
        try:
            source = fs.open(path, "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead")
        except (FileNotFoundError, IsADirectoryError):
            raise DatasetError(f"{redacted(uri)}: no such file") from None
    stream = Stream(source, PurePosixPath(urlsplit(uri).path), redacted(uri))
    with contextlib.closing(source), contextlib.closing(stream):
        yield stream


class LocalPlace:
    """An output that is a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def prepare(self) -> None:
        """Create everything that a run requires."""

    def claim(self, run_id: str, *, overwrite: bool) -> None:
        """Announce this run to others. Raises DatasetError if another run is announced."""

    def fetch(self, paths: Iterable[Path]) -> None:
        """Copy the files of an earlier run to the paths where this one reads them."""

    def publish(self, paths: Iterable[Path], *, is_complete: bool = False) -> None:
        """Copy finished files to their destination; missing ones are removed there."""

    def leave(self, paths: Iterable[Path]) -> None:
        """Remove the local copies."""


class RemotePlace:
    """An output behind a URI. It is created at `path`, next to the journal, and removed from there at the end.

    On one machine the journal's lock prevents a second run, on others the object `OUT.partial` does, unless both start
    in the same second.
    """

    def __init__(self, uri: str) -> None:
        self._parent, _, name = uri.rpartition("/")
        self._uri = uri
        self.name = redacted(uri)
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()
        self.path = state_dir() / "runs" / digest / (name or "out")
        self._marker = f"{uri}.partial"

    def prepare(self) -> None:
        if urlsplit(self._uri).query:
            raise DatasetError(f"{self.name}: an output's URI has no query")
        _filesystem(self._uri)
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DatasetError(
                f"{folder} cannot be made for the run's journal ({error.strerror}): "
                "name a folder with PAGEMILL_STATE_DIR"
            ) from None

    def claim(self, run_id: str, *, overwrite: bool) -> None:
        fs, path = _filesystem(self._marker)
        owner = {"run": run_id, "host": socket.gethostname(), "journal": f"{self.path}.partial"}
        with _library_errors(f"{self.name} cannot be written"):
            fs.invalidate_cache()
            try:
                other = json.loads(fs.cat_file(path))
            except (FileNotFoundError, ValueError):
                other = owner
            other = other if isinstance(other, dict) else {}
            if other.get("run") != run_id and not overwrite:
                raise DatasetError(
                    f"{self.name} is being written by a run on {other.get('host')}, whose journal is "
                    f"{other.get('journal')} there. Continue there; or, if it no longer exists, remove "
                    f"{redacted(self._marker)}"
                )
            fs.pipe_file(path, json.dumps(owner).encode())

    def fetch(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            fs, remote = _filesystem(self._uri_of(path))
            temporary = path.with_name(f".{path.name}.tmp")
            try:
                with (
                    _library_errors(f"{redacted(self._uri_of(path))} cannot be read"),
                    contextlib.suppress(FileNotFoundError),
                ):
                    fs.get_file(remote, str(temporary))
                    temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def publish(self, paths: Iterable[Path], *, is_complete: bool = False) -> None:
        for path in paths:
            fs, remote = _filesystem(self._uri_of(path))
            with _library_errors(f"{redacted(self._uri_of(path))} could not be written", DiskError):
                if path.exists():
                    fs.put_file(str(path), remote)
                elif fs.exists(remote):
                    fs.rm_file(remote)
        if is_complete:
            fs, remote = _filesystem(self._marker)
            with (
                _library_errors(f"{redacted(self._marker)} could not be removed", DiskError),
                contextlib.suppress(FileNotFoundError),
            ):
                fs.rm_file(remote)

    def leave(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty while there is a journal
            self.path.parent.rmdir()

    def _uri_of(self, path: Path) -> str:
        return f"{self._parent}/{path.name}"


Place = LocalPlace | RemotePlace


def place_of(out: str | Path) -> Place:
    """Return the place of an output."""
    uri = uri_of(out)
    return LocalPlace(local_path(out)) if uri is None else RemotePlace(uri)


_REASONS = {
    FileNotFoundError: "the bucket or folder is not there",
    PermissionError: "no permission",
    TimeoutError: "no answer",
}


def _filesystem(uri: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URI, and the path in it. Raises DatasetError."""
    protocol = urlsplit(uri).scheme
    extra = _EXTRAS.get(protocol)
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import get_filesystem_class
    except ModuleNotFoundError:
        name = f"'pagemill[{extra}]'" if extra else "fsspec"
        raise DatasetError(f"{protocol}:// needs fsspec: pip install {name}") from None
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        hint = f"pip install 'pagemill[{extra}]'" if extra else str(error).partition("\n")[0]
        raise DatasetError(f"{protocol}:// needs a library that is not installed: {hint}") from None
    except ValueError:
        raise DatasetError(f"{redacted(uri)}: {protocol} is not a protocol that fsspec knows") from None
    with _library_errors(f"{redacted(uri)} cannot be reached"):
        found: tuple[Any, str] = url_to_fs(uri)
    return found


@contextlib.contextmanager
def _library_errors(what: str, kind: type[DatasetError] = DatasetError) -> Iterator[None]:
    """Raise errors of the library as a DatasetError, without messages, which may contain a key or a signed address."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        reason = next(
            (words for cause, words in _REASONS.items() if isinstance(error, cause)), type(error).__name__
        )
        again = " Run the same command again; nothing that was done is lost" if kind is DiskError else ""
        raise kind(f"{what} ({reason}).{again}") from None
