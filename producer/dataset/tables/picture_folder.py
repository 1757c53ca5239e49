"""A folder of images as a source of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pagemill.producer.dataset.tables.rows import Row

COLUMN: Final = "image"
"""The only column of a folder of images."""
SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


class PictureFolder:
    """A folder of images and its subfolders: a row for each file, with its path, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.folder = folder

    def rows(self) -> Iterator[Row]:
        for number, path in enumerate(self._paths(), 1):
            yield Row(number, {COLUMN: path})

    def count(self) -> int:
        return sum(1 for _ in self._paths())

    def _paths(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
            for name in sorted(files):
                if is_picture(name):
                    yield os.path.relpath(os.path.join(folder, name), self.folder)


def is_picture(name: str) -> bool:
    """Return whether a file is an image, according to its name."""
    return not name.startswith((".", "_")) and os.path.splitext(name)[1].lower() in SUFFIXES
