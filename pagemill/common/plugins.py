"""Extensions that other installed packages register as entry points. Each is imported on first use."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class PluginError(Exception):
    """An installed package's extension can't be used; the message names the package."""


class Plugins(Generic[T]):
    """The extensions of one kind, by name. Pagemill's names cannot be replaced. Thread-safe."""

    def __init__(
        self, group: str, what: str, is_right: Callable[[Any], bool], built_in: Collection[str]
    ) -> None:
        """Describe a kind of extension; no metadata is read yet.

        Args:
            group: the group of the entry points.
            what: what an entry point should be, for messages.
            is_right: returns whether an object is valid.
            built_in: names that packages cannot use.
        """
        self._group = group
        self._what = what
        self._is_right = is_right
        self._built_in = built_in
        self._load = cache(self._load_once)  # of installed names, so its size is limited

    @cached_property
    def _found(self) -> Mapping[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self._group):
            if point.name in self._built_in:
                logger.warning(
                    "%s registers %r as one of %s, but Pagemill has that name itself: it is not used",
                    *(_package(point), point.name, self._group),
                )
            elif not _NAME.fullmatch(point.name):
                logger.warning(
                    "%s registers %r as one of %s: a name is 1 to 64 of the characters A-Z a-z 0-9 . _ -",
                    *(_package(point), point.name[:100], self._group),
                )
            else:
                found.setdefault(point.name, []).append(point)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names that other packages register. Imports none of them."""
        return tuple(sorted(self._found))

    def find(self, name: str) -> T | None:
        """Import and return an extension; None if no package registers this name.

        Raises:
            PluginError: it cannot be imported, is invalid, or two packages register the name.
        """
        if not (points := self._found.get(name)):
            return None
        found = self._load(name, *points)
        if isinstance(found, PluginError):
            raise PluginError(str(found)) from found.__cause__
        return found

    def _load_once(self, name: str, *points: EntryPoint) -> T | PluginError:
        """Load an extension; an error is returned, so that it is cached too."""
        if len(points) > 1:
            packages = ", ".join(sorted({_package(point) for point in points}))
            return PluginError(f"several packages register {name!r} as one of {self._group}: {packages}")
        (point,) = points
        place = f"{_package(point)} registers {name!r} as one of {self._group} ({point.value})"
        try:
            loaded = point.load()
        except Exception as error:  # foreign code raises anything
            failure = PluginError(f"{place}, which can't be imported: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        if not self._is_right(loaded):
            return PluginError(f"{place}, which is not {self._what}")
        found: T = loaded
        return found


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name} {point.dist.version}" if point.dist else "a package"
