"""deploy/lock.py, which is a script outside any package."""

from __future__ import annotations

import importlib.util

from tests.conftest import ROOT

_spec = importlib.util.spec_from_file_location("lock", ROOT / "deploy" / "lock.py")
assert _spec is not None
assert _spec.loader is not None
_lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_lock)

IMAGES: dict[str, tuple[str, ...]] = _lock.IMAGES
pins = _lock.pins
requirements = _lock.requirements
