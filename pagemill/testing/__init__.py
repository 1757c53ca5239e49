"""Tools for testing a service: an in-memory queue and an echo worker, as context managers and as pytest fixtures.

The classes are imported on first use, so pytest can load the plugin in an environment without the extra `testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.testing.queue import MemoryQueue
    from pagemill.testing.worker import EchoWorker

__all__ = ["EchoWorker", "MemoryQueue"]

_MODULE_OF = {"EchoWorker": "pagemill.testing.worker", "MemoryQueue": "pagemill.testing.queue"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} requires {error.name}: pip install 'pagemill[testing]'", name=error.name
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
