"""Rejects the folders' bare names: in addition to `pagemill.engine`, `import engine` would load every module again.

Lint does not see strings, `-m` or lazy imports, so this is on PYTHONPATH and also guards the processes of the tests.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

BARE_NAMES = frozenset({"producer", "engine", "kernels", "worker", "monitoring"})


class Guard(MetaPathFinder):
    """`kernels` itself passes: transformers imports any package of that name to read its version."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in BARE_NAMES and name != "kernels":
            raise ImportError(f"{name} belongs to pagemill: import pagemill.{name}", name=name)
        return None


sys.meta_path.insert(0, Guard())
