"""Finds a model's directory, downloading or converting it if needed. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pagemill.common.plugins import PluginError
from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models.echo import echo_step_seconds
from pagemill.engine.models.formats.gguf import check_gguf, gguf_directory
from pagemill.engine.models.hubs.huggingface import HuggingFace
from pagemill.engine.models.hubs.modelscope import ModelScope
from pagemill.engine.models.hubs.progress import Say
from pagemill.engine.models.hubs.repository import Snapshot
from pagemill.engine.models.misplaced import missing_config_message
from pagemill.engine.models.packaged import find_gguf, packaged_model_directory
from pagemill.engine.models.source import HOW_TO_NAME, HUBS, ModelSource

logger = logging.getLogger(__name__)


class ModelHub(Protocol):
    """A repository of a hub. Other packages register a function that creates one from a `ModelSource`."""

    def fetch(self, say: Say, check: Callable[[Path], None]) -> Snapshot:
        """Download missing files. `check` receives the folder before weights are downloaded. Raises `EngineError`."""
        ...

    def find_cached(self) -> Snapshot | None:
        """Return the cached copy if it is complete. Does not access the network."""
        ...


_HUBS: dict[str, Callable[[ModelSource], ModelHub]] = {"huggingface": HuggingFace, "modelscope": ModelScope}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine's disk."""

    source: ModelSource
    directory: Path
    commit: str | None = None
    """The commit of a hub's repository; None for other sources, or if the hub's cache does not record it."""

    def __str__(self) -> str:
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.source}{commit}, in {self.directory}"


def obtain_model(
    model: str, say: Say = logger.info, check: Callable[[Path], None] = lambda _: None
) -> LocalModel:
    """Return a model other than echo, once all of its files are on disk.

    Args:
        say: called with a line per download.
        check: called before weights are downloaded, with a directory that contains the other files.

    Raises:
        ModelLoadError: the model does not exist, or access is denied.
        EngineError: a hub does not respond, or the disk is full.
    """
    source = ModelSource.parse(model)
    match source.kind:
        case "packaged":
            return LocalModel(source, packaged_model_directory())
        case "gguf":
            return LocalModel(source, gguf_directory(Path(source.name).expanduser()))
        case "huggingface" | "modelscope" | "plugin":
            return _local(source, _fetch(source, say, check))
    return LocalModel(source, _folder(source))


def find_model(model: str) -> LocalModel | None:
    """Return the model if it is complete on disk; does not download. Raises `ModelLoadError`."""
    source = ModelSource.parse(model)
    if source.is_remote:
        snapshot = _hub(source).find_cached()
        return None if snapshot is None else _local(source, snapshot)
    return obtain_model(model)


def model_directory(model: str) -> Path:
    """Return the directory of a model other than echo. Raises like `obtain_model`."""
    return obtain_model(model).directory


def check_model(model: str) -> None:
    """Raise `ConfigError` if the model does not exist. Does not load, convert or download."""
    source = ModelSource.parse(model)
    match source.kind:
        case "echo":
            echo_step_seconds(model)
        case "packaged":
            find_gguf()
        case "gguf":
            check_gguf(Path(source.name).expanduser())
        case "folder":
            _folder(source)


def _hub(source: ModelSource) -> ModelHub:
    if source.kind != "plugin":
        return _HUBS[source.kind](source)
    try:
        make = HUBS.find(source.hub)
        assert make is not None
        hub: ModelHub = make(source)
    except PluginError as error:
        raise ModelLoadError(f"can't get {source}: {error}") from error
    return hub


def _fetch(source: ModelSource, say: Say, check: Callable[[Path], None]) -> Snapshot:
    hub = _hub(source)
    try:
        return hub.fetch(say, check)
    except EngineError:
        raise
    except Exception as error:  # another package's code can raise any error
        if source.kind != "plugin":
            raise
        raise EngineError(f"can't get {source}: {type(error).__name__}: {error}") from error


def _local(source: ModelSource, snapshot: Snapshot) -> LocalModel:
    return LocalModel(source, snapshot.directory, snapshot.commit)


def _folder(source: ModelSource) -> Path:
    directory = Path(source.name).expanduser()
    if not directory.is_dir():
        raise ModelLoadError(f"no model at {source.name!r}: {HOW_TO_NAME}")
    if not any((directory / name).is_file() for name in ("config.json", "modules.json")):
        raise ModelLoadError(missing_config_message(directory))
    return directory
