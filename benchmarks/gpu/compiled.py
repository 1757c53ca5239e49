"""Triton's cache of compiled kernels, preserved between machines that start with an empty one."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

_LARGEST_BYTES = 16 << 20
"""Maximum size of a saved file. It has compiled kernels and launchers; earlier stages would be ten times as large."""
_SUFFIXES = {".cubin", ".json", ".so"}


def cache_directory() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def save(out: Path, part: str) -> None:
    """Write `triton-PART.tgz`, unless there are no kernels to save or the file would be too large."""
    cache, target = cache_directory(), out / f"triton-{part}.tgz"
    files = sorted(path for path in cache.rglob("*") if path.suffix in _SUFFIXES)
    if not files:
        return
    with tarfile.open(target, "w:gz") as archive:
        for path in files:
            archive.add(path, path.relative_to(cache))
    if target.stat().st_size > _LARGEST_BYTES:
        target.unlink()


def restore(out: Path) -> None:
    """Unpack kernels that earlier runs saved in `out`."""
    for source in sorted(out.glob("triton-*.tgz")):
        with tarfile.open(source) as archive:
            archive.extractall(cache_directory(), filter="data")
