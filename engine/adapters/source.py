"""Finds an adapter's folder, downloading it where needed."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.errors import AdapterError, ModelLoadError
from pagemill.engine.models.hubs import huggingface
from pagemill.engine.models.source import ModelSource


def obtain_adapter(source: str) -> Path:
    """Return the folder of an adapter: `source` itself, or a copy of `org/name[@revision]` of the Hugging Face Hub.

    Raises:
        AdapterError: there is none.
        EngineError: the Hub does not answer, or a disk is full.
    """
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory
    if source.startswith(("/", "./", "../", "~")) or "/" not in source:
        raise AdapterError(f"there is no folder {source[:200]!r}")
    try:
        found = ModelSource.parse(source)
        if found.kind != "huggingface":
            raise AdapterError(
                f"{source[:200]!r} is neither a folder nor a repository of the Hugging Face Hub"
            )
        return huggingface.fetch_adapter(found)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
