"""A hub's failures as one line each, which says what to do next."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagemill.engine.errors import EngineError, ModelLoadError, is_exhausted
from pagemill.engine.models.hubs.progress import size
from pagemill.engine.models.source import ModelSource


@dataclass(frozen=True, slots=True)
class HubFacts:
    """A hub as messages describe it."""

    site: str
    """Its address."""
    cache: Path
    cache_variable: str
    """The environment variable that moves the cache."""
    token_variable: str


class HubAway(Exception):
    """The hub can't be asked: what is cached may do. `error` is for where nothing is."""

    def __init__(self, message: str, error: EngineError) -> None:
        super().__init__(message)
        self.error = error


def unreachable(source: ModelSource, facts: HubFacts, reason: str) -> HubAway:
    message = f"{facts.site} does not answer ({reason})"
    advice = "is the network up, and is a proxy needed (HTTPS_PROXY)? What has been downloaded is kept"
    return HubAway(message, EngineError(f"can't get {source}: {message}; {advice}"))


def offline(source: ModelSource, facts: HubFacts, variable: str) -> HubAway:
    return HubAway(
        f"{variable} is set",
        ModelLoadError(
            f"{variable} is set, and {source} is not, or not wholly, in {facts.cache}; unset it, or fetch the model "
            f"where there is a network: pagemill pull {source}"
        ),
    )


def refused_token(source: ModelSource, facts: HubFacts) -> ModelLoadError:
    return ModelLoadError(
        f"{facts.site} refuses the access token: it is wrong or has expired; set {facts.token_variable} to a valid "
        f"one, or unset it if {source.name} is public"
    )


def no_repository(source: ModelSource, facts: HubFacts) -> ModelLoadError:
    return ModelLoadError(
        f"{facts.site} has no model {source.name} that you may read, and there is no such folder here; check the "
        f"spelling, and for a private model set {facts.token_variable} to a token that may read it"
    )


def gated(source: ModelSource, facts: HubFacts) -> ModelLoadError:
    return ModelLoadError(
        f"{source.name} is gated: ask for access at {facts.site}/{source.name}, then set {facts.token_variable} to a "
        "token of the account that has it"
    )


def no_revision(source: ModelSource, facts: HubFacts) -> ModelLoadError:
    return ModelLoadError(
        f"{source.name} has no revision {source.revision or 'main'!r}; its branches and tags are listed at "
        f"{facts.site}/{source.name}"
    )


def disk_fault(source: ModelSource, facts: HubFacts, error: OSError) -> EngineError:
    """Explain a failure to write into the cache."""
    message = (
        f"can't keep {source.name} in {facts.cache}: {error.strerror or error}; free some room there, or give "
        f"{facts.cache_variable} a folder with room that this user can write"
    )
    return EngineError(message) if is_exhausted(error) else ModelLoadError(message)


def check_room(source: ModelSource, folder: Path, needed: int, facts: HubFacts) -> None:
    """Raise `EngineError` if the disk of `folder` has fewer than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EngineError(
            f"no room for {source.name}: {size(needed)} are still to be downloaded, and {folder} has {size(free)} "
            f"left; free some, or give {facts.cache_variable} a folder on a larger disk"
        )


def other(source: ModelSource, error: BaseException) -> ModelLoadError:
    return ModelLoadError(f"can't get {source}: {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line that says something, at most 300 characters of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it was raised from, outermost first."""
    seen: BaseException | None = error
    for _ in range(16):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__
