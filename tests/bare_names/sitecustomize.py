"""Refuses the folders' bare names: beside `pagemill.engine`, `import engine` would load every module a second time.

Lint sees neither strings nor `-m` nor lazy imports, so this is on PYTHONPATH and guards the processes of the tests too.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

BARE_NAMES = frozenset({"producer", "engine", "kernels", "worker", "monitoring"})


class Guard(MetaPathFinder):
    """`kernels` itself passes: transformers imports any package of that name to ask for its version."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in BARE_NAMES and name != "kernels":
            raise ImportError(f"{name} belongs to pagemill: import pagemill.{name}", name=name)
        return None


sys.meta_path.insert(0, Guard())
