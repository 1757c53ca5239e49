"""Converted models in the user's cache: each made once, all together bounded in bytes, none removed while in use.

One converter works at a time (a lock file); it writes into a temporary directory, fsyncs, and renames: a process
killed half-way leaves nothing that looks finished. Who uses a model holds a shared lock on its `.used` file until the
process ends, and the file's time is when that started; beyond the limit, those unused for longest are removed.
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
"""The models that this process uses, each with the descriptor that holds its shared lock."""


def cached_conversion(name: str, source: str, write: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache; `write` fills it the first time.

    Args:
        name: identifies the files that are converted, and the format of the result.
        source: the same for people, in messages.

    Raises:
        ModelLoadError: `write` raised it, or PAGEMILL_CACHE_DIR is not writable.
        EngineError: no place to store it: the disk is full, or the user's cache is not writable.
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
        if target.is_dir():  # a cache that can only be read serves as well
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

    Samples, because the whole would cost a second per gigabyte at startup: the first, the middle and the last
    MiB. The last holds a zipped checkpoint's check sums of every tensor. Times as well, since other formats have no
    sums; and not times alone, since images and archives give every file the same.

    Raises:
        ModelLoadError: one is not a regular file: a pipe or a device may have no end.
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
    """Return what to raise if a conversion can't be written to a directory of the cache."""
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
    """Be the one process that converts this model."""
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
    """Keep other processes from removing the model as long as this one lives."""
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
    """Remove what killed processes left of this model. The caller holds its lock."""
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)


def _evict(cache: Path, limit: float) -> None:
    """Remove the models unused for longest until the rest takes at most `limit` bytes."""
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
    """Remove the model unless a process uses it; returns the bytes freed."""
    descriptor = os.open(target.with_name(f"{target.name}{_USED}"), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = _size_of(target)
        # Renamed first: one that is half deleted must not look finished.
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
