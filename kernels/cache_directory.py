"""The directory of compiled kernels: the configured one, or a private one if that is not writable."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_PROBE_BYTES = 1 << 16
_PRIVATE = "PAGEMILL_PRIVATE_KERNEL_CACHE"
"""Set for child processes; not a setting for users."""


def usable(directory: Path, variable: str) -> Path:
    """Return `directory`, created if needed, or a private one that is removed with this process if it is not writable.

    Child processes share the private directory. It is logged once, with the `variable` that sets another. If
    no directory is writable, `directory` is returned unchanged.
    """
    try:
        _write_something(directory)
        return directory
    except OSError as error:
        reason = error.strerror or str(error)
    if inherited := os.environ.get(_PRIVATE):
        return Path(inherited)
    try:
        private = Path(tempfile.mkdtemp(prefix="pagemill-kernels-"))
        _write_something(private)
    except OSError:
        logger.warning("compiled kernels can't be kept in %s: %s; set %s", directory, reason, variable)
        return directory
    atexit.register(_remove, private, os.getpid())
    os.environ[_PRIVATE] = str(private)
    logger.warning(
        "compiled kernels can't be kept in %s (%s): they are compiled again at each startup; "
        "set %s to a directory that this user can write",
        directory,
        reason,
        variable,
    )
    return private


def _write_something(directory: Path) -> None:
    """Raise OSError if the directory is not writable, on a read-only file system, or full."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(bytes(_PROBE_BYTES))


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(directory, ignore_errors=True)
