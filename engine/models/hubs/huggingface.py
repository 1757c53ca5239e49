"""The Hugging Face Hub, through huggingface_hub: its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME."""

from __future__ import annotations

import contextlib
import glob
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models.hubs import failures
from pagemill.engine.models.hubs.failures import HubAway, HubFacts
from pagemill.engine.models.hubs.progress import DownloadProgress, Say
from pagemill.engine.models.hubs.repository import Listing, Snapshot, weight_names
from pagemill.engine.models.source import ModelSource, is_commit

_ASK_S = 10.0
_STALE_S = 86_400.0
"""Without a byte for this long, no download is at work on a file."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TRIES = 3
"""Of a download whose connection is reset. The library itself goes on where a stream merely ends."""


def fetch(source: ModelSource, say: Say, check: Callable[[Path], None]) -> Snapshot:
    """Download what the cache lacks. If the Hub does not answer, a whole cached copy has to do.

    Args:
        check: is called before weights are downloaded, with the folder, which has the other files.

    Raises:
        ModelLoadError: there is no such model or revision, it may not be read, or it is no model to load.
        EngineError: the Hub does not answer and the cache has no whole copy, or the disk is full.
    """
    facts = hub_facts()
    try:
        with _explained(source, facts):
            listing = _list(source)
            directory = _download(source.name, source.revision, listing.small_files())
        weights = listing.weights(directory)
        missing = [name for name in weights if not (directory / name).is_file()]
        if missing:
            check(directory)
            folder, needed = directory.parents[1], sum(listing.sizes[name] for name in missing)
            _remove_stale_parts(folder)
            failures.check_room(source, folder, needed, facts)
            with DownloadProgress(source.name, folder, needed, say), _explained(source, facts):
                _download(source.name, directory.name, weights, tries=_TRIES)
    except HubAway as away:
        cached = find_cached(source)
        if cached is None:
            raise away.error from away.__cause__
        say(f"{away}; going on with the cached copy of {source}")
        return cached
    return Snapshot(directory, directory.name)


def fetch_adapter(source: ModelSource) -> Path:
    """Return the folder of an adapter of PEFT. If the Hub does not answer, a cached copy has to do.

    Raises:
        ModelLoadError: there is no such repository, or it may not be read.
        EngineError: the Hub does not answer and nothing is cached, or the disk is full.
    """
    from huggingface_hub import try_to_load_from_cache

    facts = hub_facts()
    try:
        with _explained(source, facts):
            return _download(source.name, source.revision, list(_ADAPTER_FILES), tries=_TRIES)
    except HubAway as away:
        cached = try_to_load_from_cache(source.name, _ADAPTER_FILES[-1], revision=source.revision)
        if not isinstance(cached, str):
            raise away.error from away.__cause__
        return Path(cached).parent


def find_cached(source: ModelSource) -> Snapshot | None:
    """Return the cached copy if it is whole. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.name, "config.json", revision=source.revision)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    try:
        weight_names([file.name for file in directory.iterdir() if file.is_file()], directory, source.name)
    except ModelLoadError:
        return None
    return Snapshot(directory, directory.name if is_commit(directory.name) else None)


def hub_facts() -> HubFacts:
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{error.name} is missing; models of the Hugging Face Hub need: pip install 'pagemill[worker]'"
        ) from error
    return HubFacts(constants.ENDPOINT, Path(constants.HF_HUB_CACHE), "HF_HOME", "HF_TOKEN")


def _list(source: ModelSource) -> Listing:
    from huggingface_hub import HfApi

    for name in ("httpx", "httpx2"):  # a line for each request, some with signed addresses
        if (requests := logging.getLogger(name)).level == logging.NOTSET:
            requests.setLevel(logging.WARNING)
    found = HfApi(library_name="pagemill").model_info(
        source.name, revision=source.revision, files_metadata=True, timeout=_ASK_S
    )
    if not is_commit(found.sha):
        raise ModelLoadError(f"{source.name}: the Hub names no commit but {found.sha!r}")
    return Listing(
        source.name, str(found.sha), {file.rfilename: file.size or 0 for file in found.siblings or ()}
    )


def _download(name: str, revision: str | None, files: list[str], tries: int = 1) -> Path:
    """Return the snapshot's folder, with these files."""
    from huggingface_hub import snapshot_download

    for left in reversed(range(tries)):
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[glob.escape(file) for file in files],
                    library_name="pagemill",
                    tqdm_class=_no_bar(),
                )
            )
        except Exception as error:
            if not left or not _is_transport(error):
                raise
    raise AssertionError


def _remove_stale_parts(folder: Path) -> None:
    """Remove what killed downloads left: the library gives each try a file of its own and resumes no other's."""
    for part in folder.glob("blobs/*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()


def _no_bar() -> Any:
    """Return a class of bars that are not shown: the library's would be several, and none in a log."""
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

    return NoBar


def _is_transport(error: BaseException) -> bool:
    """Return True for errors of the HTTP library, which has changed its name between releases of huggingface_hub."""
    return type(error).__module__.partition(".")[0] in (
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "requests",
    )


@contextmanager
def _explained(source: ModelSource, facts: HubFacts) -> Iterator[None]:
    """Turn the library's errors into ours. Raises `HubAway` where a cached copy would do."""
    try:
        yield
    except (EngineError, HubAway):
        raise
    except Exception as error:  # the library's own, the HTTP library's, the disk's
        raise _explain(source, facts, error) from error


def _explain(source: ModelSource, facts: HubFacts, error: Exception) -> EngineError | HubAway:
    from huggingface_hub import errors

    for cause in failures.causes(error):
        match cause:
            case errors.OfflineModeIsEnabled():
                return failures.offline(source, facts, "HF_HUB_OFFLINE")
            case errors.GatedRepoError():
                return failures.gated(source, facts)
            case errors.RevisionNotFoundError():
                return failures.no_revision(source, facts)
            case errors.RepositoryNotFoundError():
                return failures.no_repository(source, facts)
            case errors.HfHubHTTPError():
                return _explain_status(source, facts, cause)
            case _ if _is_transport(cause):
                return failures.unreachable(source, facts, failures.first_line(cause))
            case OSError(errno=int()) | PermissionError():
                return failures.disk_fault(source, facts, cause)
    return failures.other(source, error)


def _explain_status(source: ModelSource, facts: HubFacts, error: Any) -> EngineError | HubAway:
    status = error.response.status_code
    if status == 401 and "credentials" in error.response.headers.get("X-Error-Message", ""):
        return failures.refused_token(source, facts)
    if status in (401, 403):
        return failures.no_repository(source, facts)
    if status == 429 or status >= 500:
        return failures.unreachable(source, facts, f"HTTP status {status}")
    return failures.other(source, error)
