"""The models in the hubs' caches and in Pagemill's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagemill.engine.models.hubs.progress import bytes_under
from pagemill.engine.models.source import MODELSCOPE_PREFIX, is_commit


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model's files at one revision."""

    model: str
    """The name for --model, without the revision."""
    revisions: tuple[str, ...]
    """Branches and tags that refer to these files."""
    commit: str | None
    size_bytes: int
    directory: Path


def cached_models() -> list[CachedModel]:
    """Return every model in the caches by name, including incomplete ones. Only reads directories."""
    found = [*_converted(), *_huggingface(), *_modelscope()]
    return sorted(found, key=lambda cached: (cached.model.casefold(), cached.revisions, cached.commit or ""))


def _converted() -> Iterator[CachedModel]:
    """Yield GGUF files and pickled weights, which are converted once; the packaged model is one of them."""
    try:
        from pagemill.engine.models.formats.cache import conversions
    except ModuleNotFoundError:  # a light install, which does not convert files
        return
    for directory in conversions():
        yield CachedModel(directory.name, (), None, bytes_under(directory), directory)


def _huggingface() -> Iterator[CachedModel]:
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ModuleNotFoundError:
        return
    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, ValueError):  # the cache does not exist, or is a file
        return
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            yield CachedModel(
                repository.repo_id,
                tuple(sorted(revision.refs)),
                revision.commit_hash,
                revision.size_on_disk,
                revision.snapshot_path,
            )


def _modelscope() -> Iterator[CachedModel]:
    try:
        from modelscope_hub import HubConfig
    except ModuleNotFoundError:
        return
    for directory in Path(HubConfig().cache_dir).glob("models/*--*/snapshots/*"):
        name = directory.parents[1].name.replace("--", "/", 1)
        revision = directory.name
        yield CachedModel(
            f"{MODELSCOPE_PREFIX}{name}",
            () if is_commit(revision) else (revision,),
            revision if is_commit(revision) else None,
            bytes_under(directory),
            directory,
        )
