"""ModelScope, through modelscope-hub: its cache, MODELSCOPE_API_TOKEN, MODELSCOPE_ENDPOINT and MODELSCOPE_CACHE.

The package `modelscope` is built on this one and has many dependencies that a download does not need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models.hubs.hub import Hub, HubUnavailable, first_line
from pagemill.engine.models.hubs.progress import Say
from pagemill.engine.models.hubs.repository import Listing, Snapshot
from pagemill.engine.models.source import ModelSource

_DEFAULT_REVISION = "master"
_MARKER = ".pagemill-update"
"""Marks a folder whose update is in progress or has failed: files of two commits are not a model."""
Entry = Mapping[str, Any]
"""A file of a listing: Path, Size, Sha256, Type, Revision (the commit that last changed it), CommittedDate."""


class ModelScope(Hub):
    """A repository of ModelScope. Raises `ModelLoadError` if modelscope-hub is not installed.

    Cached files are verified by the hashes that ModelScope lists, about a second per GB.
    """

    verifies = True

    def __init__(self, source: ModelSource) -> None:
        try:
            from modelscope_hub import HubApi, HubConfig
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"{error.name} is missing; models of ModelScope need: pip install 'pagemill[modelscope]'"
            ) from error
        config = HubConfig()
        super().__init__(
            source, str(config.endpoint), Path(config.cache_dir), "MODELSCOPE_CACHE", "MODELSCOPE_API_TOKEN"
        )
        self._api = HubApi(config)
        self._revision = source.revision or _DEFAULT_REVISION
        self._entries: dict[str, Entry] = {}

    def fetch(self, say: Say, check: Callable[[Path], None]) -> Snapshot:
        """Like `Hub.fetch`. Until a branch's folder is up to date, a marker records that it may mix two commits."""
        snapshot = super().fetch(say, check)
        if (marker := snapshot.directory / _MARKER).exists():
            with self._explained():
                marker.unlink()
        return snapshot

    def _list(self) -> Listing:
        files = self._api.legacy.list_repo_files(
            self.source.name, "model", revision=self._revision, recursive=False
        )
        if not files:  # the response for a revision that does not exist
            raise self.no_revision()
        self._entries = {
            str(file["Path"]): file for file in files if file.get("Type") != "tree" and file.get("Path")
        }
        sizes = {path: int(entry.get("Size") or 0) for path, entry in self._entries.items()}
        return Listing(self.source.name, _newest_commit(self._entries.values()), sizes)

    def _download(self, names: list[str], directory: Path | None = None) -> Path:
        if (before := self._snapshot_directory()) is not None:
            _mark(before)
        with nullcontext() if sys.stderr.isatty() else _without_bars():
            for name in names:
                entry = self._entries[name]
                directory = self._api.download_file(
                    self.source.name,
                    "model",
                    name,
                    revision=self._revision,
                    expected_sha256=entry.get("Sha256") or None,
                    file_size=int(entry["Size"]) if entry.get("Size") else None,
                ).parent
        assert directory is not None
        _mark(directory)
        return directory

    def _snapshot_directory(self) -> Path | None:
        from modelscope_hub import CacheNotFound

        try:
            return Path(
                self._api.download_repo(
                    self.source.name, "model", revision=self.source.revision, local_files_only=True
                )
            )
        except CacheNotFound:
            return None

    def _cached_directory(self) -> Path | None:
        directory = self._snapshot_directory()
        return None if directory is None or (directory / _MARKER).exists() else directory

    def _explain(self, error: BaseException) -> EngineError | HubUnavailable | None:
        import modelscope_hub as library

        match error:
            case library.AuthenticationError():
                return self.refused_token()
            case library.PermissionDeniedError() | library.NotExistError():
                return self.no_repository()
            case library.NetworkError() | library.ServerError() | library.RateLimitError():
                return self.unreachable(first_line(error).partition(": ")[0])
        return None


def _newest_commit(entries: Iterable[Entry]) -> str:
    """Return the last commit that changed a file; empty if the listing does not name one.

    At that commit every file matches the listing, which is sufficient here: the listing shortens the
    branch's head to at most eight digits.
    """
    dated = [(entry.get("CommittedDate") or 0, str(entry.get("Revision") or "")) for entry in entries]
    return max(dated, default=(0, ""))[1]


def _mark(directory: Path) -> None:
    with suppress(OSError):  # a read-only cache cannot become a mixture
        (directory / _MARKER).touch()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the library's progress bars, which it also draws without a terminal, from a log."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        yield
