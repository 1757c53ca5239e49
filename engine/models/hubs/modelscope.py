"""ModelScope, through modelscope-hub: its cache, MODELSCOPE_API_TOKEN, MODELSCOPE_ENDPOINT and MODELSCOPE_CACHE.

The package `modelscope` is built on this one and brings much that is no download.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models.hubs import failures
from pagemill.engine.models.hubs.failures import HubAway, HubFacts
from pagemill.engine.models.hubs.progress import DownloadProgress, Say
from pagemill.engine.models.hubs.repository import Listing, Snapshot, weight_names
from pagemill.engine.models.source import ModelSource

if TYPE_CHECKING:
    from modelscope_hub import HubApi

_DEFAULT_REVISION = "master"
_MARKER = ".pagemill-update"
"""In a folder whose update is under way or has failed: files of two commits are no model."""
Entry = Mapping[str, Any]
"""A file of a listing: Path, Size, Sha256, Type, Revision (the commit that last changed it), CommittedDate."""


def fetch(source: ModelSource, say: Say, check: Callable[[Path], None]) -> Snapshot:
    """As `huggingface.fetch`. Cached files are verified by the hashes that ModelScope lists, a second per GB."""
    api, facts = _open()
    try:
        with _explained(source, facts):
            listing, entries = _list(api, source)
    except HubAway as away:
        cached = find_cached(source)
        if cached is None:
            raise away.error from away.__cause__
        say(f"{away}; going on with the cached copy of {source}")
        return cached
    try:
        return _update(_Download(api, source, facts, entries), listing, say, check)
    except HubAway as away:
        raise away.error from away.__cause__


def find_cached(source: ModelSource) -> Snapshot | None:
    """Return the cached copy if it is whole. Asks no network."""
    directory = _directory(_open()[0], source)
    if directory is None or (directory / _MARKER).exists():
        return None
    try:
        names = [file.name for file in directory.iterdir() if file.is_file()]
        weight_names(names, directory, source.name)
    except ModelLoadError:
        return None
    return Snapshot(directory, None) if "config.json" in names else None


def cache_directory() -> Path | None:
    """Return the cache; None where modelscope-hub is not installed."""
    try:
        return _open()[1].cache
    except ModelLoadError:
        return None


def _open() -> tuple[HubApi, HubFacts]:
    try:
        from modelscope_hub import HubApi, HubConfig
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{error.name} is missing; models of ModelScope need: pip install 'pagemill[modelscope]'"
        ) from error
    config = HubConfig()
    facts = HubFacts(str(config.endpoint), Path(config.cache_dir), "MODELSCOPE_CACHE", "MODELSCOPE_API_TOKEN")
    return HubApi(config), facts


def _list(api: HubApi, source: ModelSource) -> tuple[Listing, dict[str, Entry]]:
    revision = source.revision or _DEFAULT_REVISION
    files = api.legacy.list_repo_files(source.name, "model", revision=revision, recursive=False)
    if not files:  # how it answers for a revision that is not there
        raise failures.no_revision(source, _open()[1])
    entries: dict[str, Entry] = {
        str(file["Path"]): file for file in files if file.get("Type") != "tree" and file.get("Path")
    }
    sizes = {path: int(entry.get("Size") or 0) for path, entry in entries.items()}
    return Listing(source.name, _newest_commit(entries), sizes), entries


def _newest_commit(entries: Mapping[str, Entry]) -> str:
    """Return the last commit that changed a file; empty if the listing does not say.

    At that commit every listed file is as listed, which is all that a commit is for here: the listing names the
    branch's own head by eight digits at most.
    """
    dated = [
        (entry.get("CommittedDate") or 0, str(entry.get("Revision") or "")) for entry in entries.values()
    ]
    return max(dated, default=(0, ""))[1]


@dataclass(frozen=True, slots=True)
class _Download:
    api: HubApi
    source: ModelSource
    facts: HubFacts
    entries: Mapping[str, Entry]

    def file(self, name: str) -> Path:
        """Return the file in the cache, as listed."""
        entry = self.entries[name]
        with nullcontext() if sys.stderr.isatty() else _without_bars():
            return Path(
                self.api.download_file(
                    self.source.name,
                    "model",
                    name,
                    revision=self.source.revision or _DEFAULT_REVISION,
                    expected_sha256=entry.get("Sha256") or None,
                    file_size=int(entry["Size"]) if entry.get("Size") else None,
                )
            )


def _update(download: _Download, listing: Listing, say: Say, check: Callable[[Path], None]) -> Snapshot:
    """Bring the branch's folder up to the listing. Until that is done, a marker says that it may be a mixture."""
    source, facts = download.source, download.facts
    if (before := _directory(download.api, source)) is not None:
        _mark(before)
    with _explained(source, facts):
        directory = {download.file(name).parent for name in listing.small_files()}.pop()
    _mark(directory)
    weights = listing.weights(directory)
    missing = [name for name in weights if not _has(directory / name, listing.sizes[name])]
    needed = sum(listing.sizes[name] for name in missing)
    if missing:
        check(directory)
        failures.check_room(source, directory, needed, facts)
        progress = DownloadProgress(source.name, directory, needed, say, draws=False)
    else:
        say(f"checking {len(weights)} cached files of {source.name}")
    with progress if missing else nullcontext(), _explained(source, facts):
        for name in weights:
            download.file(name)
        (directory / _MARKER).unlink(missing_ok=True)
    return Snapshot(directory, listing.commit or None)


def _directory(api: HubApi, source: ModelSource) -> Path | None:
    from modelscope_hub import CacheNotFound

    try:
        return Path(api.download_repo(source.name, "model", revision=source.revision, local_files_only=True))
    except CacheNotFound:
        return None


def _mark(directory: Path) -> None:
    with suppress(OSError):  # a cache that can't be written can't become a mixture
        (directory / _MARKER).touch()


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the library's bars, which it draws everywhere, out of a log."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        yield


@contextmanager
def _explained(source: ModelSource, facts: HubFacts) -> Iterator[None]:
    """Turn the library's errors into ours. Raises `HubAway` where a cached copy would do."""
    try:
        yield
    except (EngineError, HubAway):
        raise
    except Exception as error:
        raise _explain(source, facts, error) from error


def _explain(source: ModelSource, facts: HubFacts, error: Exception) -> EngineError | HubAway:
    import modelscope_hub as library

    for cause in failures.causes(error):
        match cause:
            case library.AuthenticationError():
                return failures.refused_token(source, facts)
            case library.PermissionDeniedError() | library.NotExistError():
                return failures.no_repository(source, facts)
            case library.NetworkError() | library.ServerError() | library.RateLimitError():
                return failures.unreachable(source, facts, failures.first_line(cause).partition(": ")[0])
            case OSError(errno=int()):
                return failures.disk_fault(source, facts, cause)
    return failures.other(source, error)
