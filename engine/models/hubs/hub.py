"""A download from a hub: the order of listing, fetching and verifying, and one-line error messages."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from pagemill.engine.errors import EngineError, ModelLoadError, is_exhausted
from pagemill.engine.models.hubs.progress import Say, logged_download, size
from pagemill.engine.models.hubs.repository import Listing, Snapshot, weight_names
from pagemill.engine.models.source import ModelSource, is_commit


class HubUnavailable(Exception):
    """The hub is unavailable; a cached copy may suffice. `error` is raised if there is none."""

    def __init__(self, message: str, error: EngineError) -> None:
        super().__init__(message)
        self.error = error


class Hub(ABC):
    """A repository of a hub.

    Args:
        site: the hub's address.
        cache_variable: the environment variable with the cache's location.
        token_variable: the environment variable with the access token.
    """

    has_bars = False
    """True if the library draws progress bars of all files on a terminal."""
    verifies = False
    """True if the library reads cached files to verify them."""

    def __init__(
        self, source: ModelSource, site: str, cache: Path, cache_variable: str, token_variable: str
    ) -> None:
        self.source = source
        self.site = site
        self.cache = cache
        self.cache_variable = cache_variable
        self.token_variable = token_variable

    def fetch(self, say: Say, check: Callable[[Path], None]) -> Snapshot:
        """Download files missing in the cache. If the hub does not respond, a complete cached copy is used.

        Args:
            check: called before weights are downloaded, with the folder, which contains the other files.

        Raises:
            ModelLoadError: the model or revision does not exist, access is denied, or it cannot be loaded.
            EngineError: the hub does not respond and the cache lacks a complete copy, or the disk is full.
        """
        try:
            with self._explained():
                listing = self._list()
                directory = self._download(listing.small_files())
            self._fetch_weights(listing, directory, say, check)
        except HubUnavailable as unavailable:
            cached = self.find_cached()
            if cached is None:
                raise unavailable.error from unavailable.__cause__
            say(f"{unavailable}; continuing with the cached copy of {self.source}")
            return cached
        commit = directory.name if is_commit(directory.name) else listing.commit
        return Snapshot(directory, commit or None)

    def _fetch_weights(
        self, listing: Listing, directory: Path, say: Say, check: Callable[[Path], None]
    ) -> None:
        weights = listing.weights(directory)
        sizes = {name: listing.sizes[name] for name in weights}
        missing = [name for name, count in sizes.items() if not _has(directory / name, count)]
        progress: AbstractContextManager[None] = nullcontext()
        if missing:
            check(directory)
            needed = sum(sizes[name] for name in missing)
            self._check_room(directory, needed)
            progress = logged_download(
                self.source.name, self._store(directory), needed, say, has_bar=self.has_bars
            )
        elif self.verifies:
            say(f"checking {len(weights)} cached files of {self.source.name}")
        else:
            return
        with progress, self._explained():
            self._download(weights, directory)

    def find_cached(self) -> Snapshot | None:
        """Return the cached copy if it is complete. Does not access the network."""
        directory = self._cached_directory()
        if directory is None or not (directory / "config.json").is_file():
            return None
        names = [file.name for file in directory.iterdir() if file.is_file()]
        try:
            weight_names(names, directory, self.source.name)
        except ModelLoadError:
            return None
        return Snapshot(directory, directory.name if is_commit(directory.name) else None)

    @abstractmethod
    def _list(self) -> Listing:
        """Return the repository's files at the source's revision."""

    @abstractmethod
    def _download(self, names: list[str], directory: Path | None = None) -> Path:
        """Fetch the files missing in the cache; return the snapshot's folder.

        Args:
            directory: the snapshot of an earlier call to which these files belong.
        """

    @abstractmethod
    def _cached_directory(self) -> Path | None:
        """Return the cached snapshot of the source's revision, complete or not."""

    @abstractmethod
    def _explain(self, error: BaseException) -> EngineError | HubUnavailable | None:
        """Translate an error of the hub's library; return None for any other."""

    def _store(self, directory: Path) -> Path:
        """Return the folder that grows while files of a snapshot are downloaded."""
        return directory

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate the library's errors. Raises `HubUnavailable` if a cached copy would suffice."""
        try:
            yield
        except (EngineError, HubUnavailable):
            raise
        except Exception as error:  # of this library, the HTTP library, or the disk
            for cause in _causes(error):
                if (explained := self._explain(cause)) is not None:
                    raise explained from error
                if isinstance(cause, OSError) and (
                    cause.errno is not None or isinstance(cause, PermissionError)
                ):
                    raise self._disk_fault(cause) from error
            raise self.other(error) from error

    def unreachable(self, reason: str) -> HubUnavailable:
        message = f"{self.site} does not answer ({reason})"
        advice = "is the network up, and is a proxy needed (HTTPS_PROXY)? What has been downloaded is kept"
        return HubUnavailable(message, EngineError(f"can't get {self.source}: {message}; {advice}"))

    def refused_token(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.site} rejects the access token: it is wrong or has expired; set {self.token_variable} to a "
            f"valid one, or unset it if {self.source.name} is public"
        )

    def no_repository(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.site} has no model {self.source.name} that you can read, and the folder does not exist here; "
            f"check the spelling, and for a private model set {self.token_variable} to a token that may read it"
        )

    def no_revision(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.source.name} has no revision {self.source.revision or 'main'!r}; its branches and tags are "
            f"listed at {self.site}/{self.source.name}"
        )

    def other(self, error: BaseException) -> ModelLoadError:
        return ModelLoadError(f"can't get {self.source}: {type(error).__name__}: {first_line(error)}")

    def _disk_fault(self, error: OSError) -> EngineError:
        message = (
            f"can't keep {self.source.name} in {self.cache}: {error.strerror or error}; free some room there, or "
            f"give {self.cache_variable} a folder with room that this user can write"
        )
        return EngineError(message) if is_exhausted(error) else ModelLoadError(message)

    def _check_room(self, directory: Path, needed: int) -> None:
        """Raise `EngineError` if the disk has fewer than `needed` bytes left."""
        folder = self._store(directory)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise EngineError(
                f"no room for {self.source.name}: {size(needed)} are still to be downloaded, and {folder} has "
                f"{size(free)} left; free some, or give {self.cache_variable} a folder on a larger disk"
            )


def first_line(error: BaseException) -> str:
    """Return up to 300 characters of the first line that is not blank."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _has(file: Path, size_bytes: int) -> bool:
    """Return whether a file is complete. Some mirrors do not list sizes: 0 means unknown."""
    return file.is_file() and size_bytes in (0, file.stat().st_size)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, outermost first."""
    cause: BaseException | None = error
    for _ in range(16):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__
