"""Records which models have been compared with transformers, so that later starts skip the comparison.

One empty file per model in the user's cache, up to 256 of them, each for 30 days.
"""

from __future__ import annotations

import hashlib
import logging
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pagemill.engine.models.formats.cache import cache_directory

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1
"""Incremented when the comparison itself changes."""
_MOST = 256
_KEPT_S = 30 * 86_400.0


def is_verified(fingerprint: str) -> bool:
    """Return True if this model has been compared with these versions of Pagemill, torch and transformers."""
    try:
        return time.time() - _entry(fingerprint).stat().st_mtime < _KEPT_S
    except OSError:
        return False


def remember_verified(fingerprint: str) -> None:
    """Record a successful comparison. If the directory is not writable, the next start repeats it."""
    entry = _entry(fingerprint)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.touch()
        by_age = sorted(entry.parent.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for number, file in enumerate(by_age):
            if number >= _MOST or time.time() - file.stat().st_mtime >= _KEPT_S:
                file.unlink(missing_ok=True)
    except OSError as error:
        logger.info("can't remember the comparison in %s: %s", entry.parent, error.strerror or error)


def _entry(fingerprint: str) -> Path:
    versions = [_version(package) for package in ("pagemill", "torch", "transformers")]
    name = hashlib.sha256(" ".join([fingerprint, str(_FORMAT_VERSION), *versions]).encode()).hexdigest()
    return cache_directory() / "verified" / name[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
