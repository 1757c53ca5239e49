"""The running version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the package's version; 0 for sources that are not installed."""
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0"
