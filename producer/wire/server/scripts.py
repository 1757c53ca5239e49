"""The Lua scripts, and the value type of a script call. This module does no I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_JOINED = 64
"""Maximum number of calls that one run of a script answers, so that it does not block the server for long."""
MAX_JOINED_BYTES = 1 << 20
"""Maximum bytes of their arguments; a single call may have more."""

_INCLUDE = re.compile(r"^-- @(include|hooks) ([\w/ ]+)\n", re.MULTILINE)
"""Includes a file, or the sections of all files for some hooks."""
_HOOK = re.compile(r"^-- @hook (\w+)\n", re.MULTILINE)
"""Starts a section, which is included at its hook."""
_LEVEL, _BEGIN, _END = "-- @level\n", "return (function()\n", "end)()\n"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One atomic transition, not yet run: a transport sends it and returns `parse(reply)`.

    Every script tolerates being sent twice, so a call whose reply was lost may be repeated.
    """

    script: str
    """The script's name: a file of `producer/wire/lua/` or its folder `core/`, without the suffix."""
    keys: tuple[str, ...]
    args: tuple[str | bytes | int | float, ...]
    parse: Callable[[Any], T]
    is_listed: bool = False
    """The script answers several such calls in one run, or the first of them: see `listed`."""

    @property
    def size(self) -> int:
        """Return the approximate bytes of its arguments."""
        return sum(len(argument) for argument in self.args if isinstance(argument, str | bytes))


def listed(
    script: str, keys: tuple[str, ...], args: tuple[str | bytes | int | float, ...], parse: Callable[[Any], T]
) -> Call[T]:
    """Return the call of a script that takes a list, with a list of one (`each.lua`)."""
    return Call(script, keys, (len(args), *args), lambda reply: parse(reply[0]), is_listed=True)


def as_map(reply: Sequence[Any]) -> dict[str, Any]:
    """Return a reply of alternating names and values as a mapping. Later releases may add some."""
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=True)}


def packed(calls: Sequence[Call[Any]]) -> list[list[Call[Any]]]:
    """Group calls by the run of a script that answers them: neighbours of one script that takes a list."""
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
    return call.is_listed and (first.script, first.keys) == (call.script, call.keys)


def joined(pack: Sequence[Call[Any]]) -> Call[Any]:
    """Return the call that answers the pack; for several calls, with a list of replies to the first ones."""
    if len(pack) == 1:
        return pack[0]
    args = tuple(argument for call in pack for argument in call.args)
    return Call(pack[0].script, pack[0].keys, args, list)


@cache
def source(name: str) -> str:
    """Return the script's text, with `core/common.lua` and each included file inlined once.

    The part after a line `-- @level` becomes a separate function. For each variable that a new function uses, Lua
    searches those of the other functions on the same level: a script with one long level takes a fifth longer to start.
    """
    included: set[str] = set()
    text = _expanded("core/common", included) + _expanded(
        name if name in _files() else f"core/{name}", included
    )
    return text.replace(_LEVEL, _BEGIN) + _END * text.count(_LEVEL)


def _expanded(name: str, included: set[str]) -> str:
    """Return a file, or its section `<file> <hook>`, with everything that it includes."""
    if name in included:
        return ""
    included.add(name)
    file, _, hook = name.partition(" ")
    text, *sections = _HOOK.split(_files()[file])
    if hook:
        text = _expanded(file, included) + dict(zip(sections[::2], sections[1::2], strict=True))[hook]

    def replacement(match: re.Match[str]) -> str:
        wanted = [match[2]] if match[1] == "include" else _sections(match[2])
        return "".join(_expanded(one, included) for one in wanted)

    return _INCLUDE.sub(replacement, text)


def _sections(hooks: str) -> list[str]:
    """Return the sections that are for these hooks, as `<file> <hook>`."""
    texts = sorted(_files().items())
    return [
        f"{file} {hook}" for hook in hooks.split() for file, text in texts if f"-- @hook {hook}\n" in text
    ]


@cache
def _files() -> dict[str, str]:
    """Return the text of every file, by its path without the suffix."""
    texts: dict[str, str] = {}
    folders = [("", files("pagemill.producer.wire") / "lua")]
    for prefix, folder in folders:
        for path in folder.iterdir():
            if path.is_dir():
                folders.append((f"{prefix}{path.name}/", path))
            else:
                texts[prefix + path.name.removesuffix(".lua")] = path.read_text(encoding="utf-8")
    return texts


@cache
def names() -> tuple[str, ...]:
    """Return every script that can be called, without the files that others include."""
    texts = _files()
    included = {name for text in texts.values() for _, name in _INCLUDE.findall(text)} | {"core/common"}
    scripts = (name for name in texts.keys() - included if "-- @hook " not in texts[name])
    return tuple(sorted(name.removeprefix("core/") for name in scripts))


@cache
def sha1(name: str) -> str:
    """Return the script's digest for EVALSHA."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
