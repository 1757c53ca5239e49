"""A hub: folders below PAGEMILL_EXAMPLE_HUB."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.hubs.repository import Snapshot
from pagemill.engine.models.source import ModelSource


class ExampleHub:
    """A repository of the hub."""

    def __init__(self, source: ModelSource) -> None:
        self._name = source.name
        self._directory = Path(os.environ["PAGEMILL_EXAMPLE_HUB"]) / source.name

    def fetch(self, say: Callable[[str], None], check: Callable[[Path], None]) -> Snapshot:
        """Return the folder; a real hub downloads it."""
        if self._name == "org/raises":
            raise ValueError("out of order")
        if (found := self.find_cached()) is None:
            raise ModelLoadError(f"the example hub has no model {self._name}")
        check(found.directory)
        say(f"found {self._name}")
        return found

    def find_cached(self) -> Snapshot | None:
        """Return the folder if it is there."""
        return Snapshot(self._directory, None) if self._directory.is_dir() else None
