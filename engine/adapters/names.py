"""The adapters that requests can name. Safe on any thread."""

from __future__ import annotations

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.errors import UnknownAdapter

_MAX_NAMES_TOLD = 20


class AdapterNames:
    def __init__(self) -> None:
        self._named: dict[str, Adapter] = {}

    def find(self, name: str) -> Adapter:
        """Return the adapter of this name. Raises `UnknownAdapter`, which lists the known names."""
        adapter = self._named.get(name)
        if adapter is None:
            raise self.unknown(name)
        return adapter

    def registered(self) -> list[Adapter]:
        """Return the named adapters, sorted by name."""
        return sorted(self._named.copy().values(), key=lambda adapter: adapter.name)

    def unknown(self, name: str) -> UnknownAdapter:
        """Return the error for an unknown name."""
        names = sorted(self._named.copy())
        known = ", ".join(names[:_MAX_NAMES_TOLD]) + (", ..." if len(names) > _MAX_NAMES_TOLD else "")
        return UnknownAdapter(f"unknown adapter {name!r}; known: {known or 'none'}")
