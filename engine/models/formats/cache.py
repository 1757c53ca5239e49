"""Converted models in the user's cache, with a size limit; models in use are not removed.

One converter runs at a time (a lock file). It writes to a temporary directory, fsyncs, and renames, so that a killed
process does not leave a result that appears complete. A user of a model holds a shared lock on its `.used` file until
the process exits; the file's time is the start of that use. Above the limit, those unused for longest are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pagemill.engine.errors import ConfigError, EngineError, ModelLoadError, is_exhausted

logger = logging.getLogger(__name__)

_DIRECTORY_VARIABLE = "PAGEMILL_CACHE_DIR"
_LIMIT_VARIABLE = "PAGEMILL_CACHE_GIB"
_DEFAULT_LIMIT_GIB = 100.0
_USED = ".used"
_SAMPLE_BYTES = 2**20
_held: dict[Path, int] = {}
"""The models that this process uses, each with the file descriptor of its shared lock."""


def cached_conversion(name: str, source: str, write: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache; `write` fills it on first use.

    Args:
        name: identifies the files that are converted, and the format of the result.
        source: the same in readable form, for messages.

    Raises:
        ModelLoadError: `write` raised it, or PAGEMILL_CACHE_DIR is not writable.
        EngineError: it cannot be stored: the disk is full, or the user's cache is not writable.
    """
    target = cache_directory() / name
    limit = _limit_bytes()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _hold(target)
        if target.is_dir():
            return target
        with _converting(target):
            if not target.is_dir():
                _make(target, write)
                _evict(target.parent, limit)
    except OSError as error:
        if target.is_dir():  # a read-only cache suffices
            return target
        raise not_kept(source, target.parent, error) from error
    return target


def conversions() -> list[Path]:
    """Return the converted models in the cache."""
    return sorted(
        target
        for file in cache_directory().glob(f"*{_USED}")
        if (target := file.with_name(file.name.removesuffix(_USED))).is_dir()
    )


def identity(files: Iterable[Path]) -> str:
    """Return a digest of files' names, sizes, times and samples.

    Samples, because complete files would take a second per gigabyte at startup: the first, the middle and the last
    MiB. The last contains a zipped checkpoint's checksums of every tensor. Times are included because other formats do
    not have checksums; times alone are insufficient because images and archives assign the same time to every file.

    Raises:
        ModelLoadError: one is not a regular file: a pipe or a device may be endless.
    """
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"can't load the weights in {file}: not a regular file")
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with file.open("rb") as opened:
            for at in (0, status.st_size // 2, max(0, status.st_size - _SAMPLE_BYTES)):
                opened.seek(at)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:20]


def cache_directory() -> Path:
    """Return the user's cache of converted and compared models."""
    explicit = os.environ.get(_DIRECTORY_VARIABLE)
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"


def _limit_bytes() -> float:
    text = os.environ.get(_LIMIT_VARIABLE) or str(_DEFAULT_LIMIT_GIB)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ConfigError(
            f"{_LIMIT_VARIABLE}={text!r}: should be the gibibytes that converted models may take"
        )
    return limit * 2**30


def not_kept(source: str, directory: Path, error: OSError) -> EngineError:
    """Return the error for a conversion that cannot be written to a directory of the cache."""
    message = (
        f"{source}, converted, can't be kept in {directory}: {error.strerror or error}; "
        f"give {_DIRECTORY_VARIABLE} a directory with room for it that this user can write"
    )
    is_theirs = bool(os.environ.get(_DIRECTORY_VARIABLE)) and not is_exhausted(error)
    return ModelLoadError(message, setting="cache_dir") if is_theirs else EngineError(message)


def _lock(target: Path) -> FileLock:
    return FileLock(target.parent / f"{target.name}.lock", fallback_to_soft=False)


@contextmanager
def _converting(target: Path) -> Iterator[None]:
    """Hold the lock of the only process that converts this model."""
    lock = _lock(target)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for another process, which is converting %s", target.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _hold(target: Path) -> None:
    """Prevent other processes from removing the model while this one runs."""
    if target in _held:
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(target.with_name(f"{target.name}{_USED}"), flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    _held[target] = descriptor


def _make(target: Path, write: Callable[[Path], None]) -> None:
    _remove_leftovers(target)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(work)
        for file in work.iterdir():
            _fsync(file)
        _fsync(work)
        os.rename(work, target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _remove_leftovers(target: Path) -> None:
    """Remove files that killed processes left of this model. The caller holds its lock."""
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)


def _evict(cache: Path, limit: float) -> None:
    """Remove the models unused for longest until the rest fits in `limit` bytes."""
    used = {
        file.with_name(file.name.removesuffix(_USED)): file.stat().st_mtime
        for file in cache.glob(f"*{_USED}")
    }
    oldest_first = sorted(used, key=lambda target: used[target])
    total = 0
    for target in oldest_first:
        if target not in _held:
            _clear_after_dead(target)
        total += _size_of(target)
    for target in oldest_first:
        if total <= limit:
            return
        if target not in _held and target.is_dir():
            total -= _remove_unused(target)


def _clear_after_dead(target: Path) -> None:
    try:
        with _lock(target).acquire(timeout=0):
            _remove_leftovers(target)
    except Timeout:
        pass  # it is being converted


def _remove_unused(target: Path) -> int:
    """Remove the model unless a process uses it; return the number of freed bytes."""
    descriptor = os.open(target.with_name(f"{target.name}{_USED}"), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = _size_of(target)
        # Renamed first: a partially deleted one must not appear complete.
        grave = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        os.rename(target, grave / "removed")
        shutil.rmtree(grave, ignore_errors=True)
    except BlockingIOError:
        return 0
    finally:
        os.close(descriptor)
    logger.info("removed %s (%.1f GiB) from the cache of converted models", target.name, size / 2**30)
    return size


def _size_of(directory: Path) -> int:
    return sum(file.lstat().st_size for file in directory.iterdir()) if directory.is_dir() else 0


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
