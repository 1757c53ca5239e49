"""Finds an adapter's folder, downloading it if needed."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.errors import AdapterError, ModelLoadError
from pagemill.engine.models.hubs.huggingface import HuggingFace
from pagemill.engine.models.source import ModelSource


def obtain_adapter(source: str) -> Path:
    """Return the folder of an adapter: `source` itself, or a copy of `org/name[@revision]` of the Hugging Face Hub.

    Raises:
        AdapterError: the adapter does not exist.
        EngineError: the Hub does not respond, or a disk is full.
    """
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory
    if source.startswith(("/", "./", "../", "~")) or "/" not in source:
        raise AdapterError(f"folder {source[:200]!r} does not exist")
    try:
        found = ModelSource.parse(source)
        if found.kind != "huggingface":
            raise AdapterError(
                f"{source[:200]!r} is neither a folder nor a repository of the Hugging Face Hub"
            )
        return HuggingFace(found).fetch_adapter()
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
