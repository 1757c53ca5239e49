"""An adapter by name, and the errors around it. Plain types, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagemill.bounds import ADAPTER_NAME, ADAPTER_NAME_RULE
from pagemill.engine.errors import ConfigError, InvalidRequest


class AdapterError(ConfigError):
    """No such adapter folder, or one that this model can't be run with. The message says which and why."""

    code = "adapter_error"


class UnknownAdapter(InvalidRequest):
    """The request names an adapter that is not there."""

    code = "unknown_adapter"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has been read and checked."""

    name: str
    directory: Path
    digest: str
    """Identifies its weights and scale: of the same name, other weights are another adapter."""
    rank: int
    """The largest of its layers'."""
    num_bytes: int
    """In memory, as the device holds it."""


def parse_adapter(text: str) -> tuple[str, str]:
    """Split `name=source`. Raises `AdapterError`."""
    name, separator, source = text.partition("=")
    if not separator or not source:
        raise AdapterError(f"adapters: {text[:100]!r} is not NAME=FOLDER", "adapters")
    if not ADAPTER_NAME.fullmatch(name):
        raise AdapterError(f"adapters: {name[:100]!r} won't do: {ADAPTER_NAME_RULE}", "adapters")
    return name, source
