"""ModelScope, through modelscope-hub: its cache, MODELSCOPE_API_TOKEN, MODELSCOPE_ENDPOINT and MODELSCOPE_CACHE.

The package `modelscope` is built on this one and brings much that is no download.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
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
Entry = Mapping[str, Any]
"""A file of a listing: Path, Size, Sha256, Type, Revision (the commit that last changed it), CommittedDate."""


def fetch(source: ModelSource, say: Say, check: Callable[[Path], None]) -> Snapshot:
    """As `huggingface.fetch`. Cached files are verified by the hashes that ModelScope lists, a second per GB."""
    api, facts = _open()
    try:
        with _explained(source, facts):
            listing, entries = _list(api, source)
            small = listing.small_files()
            directory = {_download(api, source, entries[name]).parent for name in small}.pop()
        weights = listing.weights(directory)
        missing = [name for name in weights if not (directory / name).is_file()]
        needed = sum(listing.sizes[name] for name in missing)
        if missing:
            check(directory)
            failures.check_room(source, directory, needed, facts)
            progress = DownloadProgress(source.name, directory, needed, say, draws=False)
        else:
            say(f"checking {len(weights)} cached files of {source.name}")
        with progress if missing else nullcontext(), _explained(source, facts):
            for name in weights:
                _download(api, source, entries[name])
    except HubAway as away:
        cached = find_cached(source)
        if cached is None:
            raise away.error from away.__cause__
        say(f"{away}; going on with the cached copy of {source}")
        return cached
    return Snapshot(directory, listing.commit or None)


def find_cached(source: ModelSource) -> Snapshot | None:
    """Return the cached copy if it is whole. Asks no network."""
    from modelscope_hub import CacheNotFound

    api, _ = _open()
    try:
        directory = Path(
            api.download_repo(source.name, "model", revision=source.revision, local_files_only=True)
        )
        names = [file.name for file in directory.iterdir() if file.is_file()]
        if "config.json" not in names:
            return None
        weight_names(names, directory, source.name)
    except (CacheNotFound, ModelLoadError):
        return None
    return Snapshot(directory, None)


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


def _download(api: HubApi, source: ModelSource, entry: Entry) -> Path:
    with nullcontext() if sys.stderr.isatty() else _without_bars():
        return Path(
            api.download_file(
                source.name,
                "model",
                str(entry["Path"]),
                revision=source.revision or _DEFAULT_REVISION,
                expected_sha256=entry.get("Sha256") or None,
                file_size=int(entry["Size"]) if entry.get("Size") else None,
            )
        )


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
