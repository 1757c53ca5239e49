"""The Hugging Face Hub, through huggingface_hub: its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME."""

from __future__ import annotations

import contextlib
import glob
import logging
import time
from pathlib import Path
from typing import Any

from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models.hubs.hub import Hub, HubUnavailable, first_line
from pagemill.engine.models.hubs.repository import Listing
from pagemill.engine.models.source import ModelSource, is_commit

_ASK_S = 10.0
_STALE_S = 86_400.0
"""If a file has not grown for this long, no download is writing to it."""
_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
_TRIES = 3
"""Retries of a download whose connection is reset. The library only resumes streams that end early."""
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")
"""Names in different releases of huggingface_hub."""


class HuggingFace(Hub):
    """A repository of the Hugging Face Hub. Raises `ModelLoadError` if huggingface_hub is not installed."""

    def __init__(self, source: ModelSource) -> None:
        try:
            from huggingface_hub import constants
            from huggingface_hub.utils.tqdm import are_progress_bars_disabled
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"{error.name} is missing; models of the Hugging Face Hub need: pip install 'pagemill[worker]'"
            ) from error
        super().__init__(source, constants.ENDPOINT, Path(constants.HF_HUB_CACHE), "HF_HOME", "HF_TOKEN")
        self.has_bars = not are_progress_bars_disabled()

    def fetch_adapter(self) -> Path:
        """Return the folder of a PEFT adapter. If the Hub does not respond, a cached copy is used.

        Raises:
            ModelLoadError: the repository does not exist, or access is denied.
            EngineError: the Hub does not respond and there is no cached copy, or the disk is full.
        """
        try:
            with self._explained():
                return self._download(_ADAPTER_FILES)
        except HubUnavailable as unavailable:
            cached = self._cached_directory(_ADAPTER_FILES[-1])
            if cached is None:
                raise unavailable.error from unavailable.__cause__
            return cached

    def _list(self) -> Listing:
        from huggingface_hub import HfApi

        for name in ("httpx", "httpx2"):  # a line for each request, some with signed addresses
            if (requests := logging.getLogger(name)).level == logging.NOTSET:
                requests.setLevel(logging.WARNING)
        info = HfApi(library_name="pagemill").model_info(
            self.source.name, revision=self.source.revision, files_metadata=True, timeout=_ASK_S
        )
        if not is_commit(info.sha):
            raise ModelLoadError(f"{self.source.name}: the Hub names no commit but {info.sha!r}")
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return Listing(self.source.name, str(info.sha), sizes)

    def _download(self, names: list[str], directory: Path | None = None) -> Path:
        from huggingface_hub import snapshot_download

        for left in reversed(range(_TRIES)):
            try:
                snapshot = snapshot_download(
                    self.source.name,
                    revision=directory.name if directory else self.source.revision,
                    allow_patterns=[glob.escape(name) for name in names],
                    library_name="pagemill",
                    tqdm_class=_terminal_bar(is_shown=directory is not None),
                )
                break
            except Exception as error:
                if not left or not _is_transport(error):
                    raise
        _remove_stale_parts(self._store(Path(snapshot)))
        return Path(snapshot)

    def _cached_directory(self, file: str = "config.json") -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.source.name, file, revision=self.source.revision)
        return Path(path).parent if isinstance(path, str) else None

    def _store(self, directory: Path) -> Path:
        return directory.parents[1]  # a snapshot contains links to files there

    def _explain(self, error: BaseException) -> EngineError | HubUnavailable | None:
        from huggingface_hub import errors

        match error:
            case errors.OfflineModeIsEnabled():
                return self._offline()
            case errors.GatedRepoError():
                return ModelLoadError(
                    f"{self.source.name} is gated: ask for access at {self.site}/{self.source.name}, then set "
                    f"{self.token_variable} to a token of the account that has it"
                )
            case errors.RevisionNotFoundError():
                return self.no_revision()
            case errors.RepositoryNotFoundError():
                return self.no_repository()
            case errors.HfHubHTTPError():
                return self._explain_status(error)
        return self.unreachable(first_line(error)) if _is_transport(error) else None

    def _explain_status(self, error: Any) -> EngineError | HubUnavailable:
        status = error.response.status_code
        if status == 401 and "credentials" in error.response.headers.get("X-Error-Message", ""):
            return self.refused_token()
        if status in (401, 403):
            return self.no_repository()
        if status == 429 or status >= 500:
            return self.unreachable(f"HTTP status {status}")
        return self.other(error)

    def _offline(self) -> HubUnavailable:
        message = "HF_HUB_OFFLINE is set"
        return HubUnavailable(
            message,
            ModelLoadError(
                f"{message}, and {self.source} is not, or not wholly, in {self.cache}; unset it, or fetch the "
                f"model where there is a network: pagemill pull {self.source}"
            ),
        )


def _remove_stale_parts(folder: Path) -> None:
    """Remove files of killed downloads: the library uses one file per attempt and does not resume others."""
    for part in folder.glob("blobs/*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()


def _terminal_bar(*, is_shown: bool) -> Any:
    """Return a progress bar class that draws only on a terminal: the library's also writes to logs.

    Args:
        is_shown: False hides them there as well, for the small files that are checked at startup.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class TerminalBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": None if is_shown else True})  # type: ignore[no-untyped-call]

    return TerminalBar


def _is_transport(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES
