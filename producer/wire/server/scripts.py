"""The Lua scripts, and the value type of a script call. No I/O happens here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One atomic transition, not yet run: a transport sends it and returns `parse(reply)`.

    Every script tolerates being sent twice, so a call whose reply was lost may be repeated.
    """

    script: str
    """The script's name: `producer/wire/lua/<script>.lua`."""
    keys: tuple[str, ...]
    args: tuple[str | bytes | int | float, ...]
    parse: Callable[[Any], T]


@cache
def source(name: str) -> str:
    """Return the script's text, with each included file inlined once."""
    return expanded(files("pagemill.producer.wire") / "lua", name)


def expanded(folder: Traversable, name: str, seen: set[str] | None = None) -> str:
    """Return a script of that folder; what is in `seen` is included already."""
    seen = set() if seen is None else seen
    if name in seen:
        return ""
    seen.add(name)
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: expanded(folder, match[1], seen), text)


@cache
def names() -> tuple[str, ...]:
    """Return every script that can be called, without the files that others include."""
    texts = {
        path.name.removesuffix(".lua"): path.read_text(encoding="utf-8")
        for path in (files("pagemill.producer.wire") / "lua").iterdir()
    }
    included = {name for text in texts.values() for name in _INCLUDE.findall(text)}
    return tuple(sorted(texts.keys() - included))


@cache
def sha1(name: str) -> str:
    """Return the script's digest for EVALSHA."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
