"""The Lua scripts, and the value type of a script call. No I/O happens here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_JOINED = 64
"""Calls that one run of a script answers, so that it does not stop the server for long."""
MAX_JOINED_BYTES = 1 << 20
"""Of their arguments; a single call may have more."""

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_LEVEL, _BEGIN, _END = "-- @level\n", "return (function()\n", "end)()\n"


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
    plural: str = ""
    """A script that answers several such calls in one run, or the first of them: see `each.lua`."""

    @property
    def size(self) -> int:
        """Bytes of its arguments, about."""
        return sum(len(argument) for argument in self.args if isinstance(argument, str | bytes))


def packed(calls: Sequence[Call[Any]]) -> list[list[Call[Any]]]:
    """Group calls by the run of a script that answers them: neighbours that have the same plural."""
    packs: list[list[Call[Any]]] = []
    size = 0
    for call in calls:
        size += call.size
        if packs and len(packs[-1]) < MAX_JOINED and size <= MAX_JOINED_BYTES and _joins(packs[-1][0], call):
            packs[-1].append(call)
        else:
            packs.append([call])
            size = call.size
    return packs


def _joins(first: Call[Any], call: Call[Any]) -> bool:
    return call.plural != "" and (first.plural, first.keys) == (call.plural, call.keys)


def joined(pack: Sequence[Call[Any]]) -> Call[Any]:
    """Return the call that answers the pack; for several calls, with a list of replies to the first ones."""
    if len(pack) == 1:
        return pack[0]
    args = tuple(argument for call in pack for argument in (len(call.args), *call.args))
    return Call(pack[0].plural, pack[0].keys, args, list)


@cache
def source(name: str) -> str:
    """Return the script's text, with each included file inlined once."""
    return expanded(files("pagemill.producer.wire") / "lua", name)


def expanded(folder: Traversable, name: str, seen: set[str] | None = None) -> str:
    """Return a script of that folder; what is in `seen` is included already.

    What follows a line `-- @level` is a function of its own. For each variable that a new function uses Lua goes
    through those that other functions use on the same level: a script of one long level takes a fifth longer to begin.
    """
    included = set() if seen is None else seen
    if name in included:
        return ""
    included.add(name)
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    text = _INCLUDE.sub(lambda match: expanded(folder, match[1], included), text)
    return text if seen is not None else text.replace(_LEVEL, _BEGIN) + _END * text.count(_LEVEL)


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
