"""The directory of compiled kernels: the configured one, or a private one of this process if that can't be used."""

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
"""Set here, for the processes that this one starts; no setting."""


def usable(directory: Path, variable: str) -> Path:
    """`directory`, created if needed; if it is not writable, a private one that is removed with this process.

    Processes that this one starts share it. This is logged once, with the `variable` that sets another. Where no
    directory can be written at all, `directory` is returned as it is.
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
    """Raises OSError where that fails: rights, a read-only file system, a full one."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(bytes(_PROBE_BYTES))


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        shutil.rmtree(directory, ignore_errors=True)
