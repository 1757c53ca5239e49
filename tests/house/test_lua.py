"""The queue's scripts: the core does not name a feature, and each file starts with its includes."""

from __future__ import annotations

import ast
import re

from tests.conftest import ROOT

LUA = ROOT / "producer" / "wire" / "lua"
TEXTS = {
    path.relative_to(LUA).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in LUA.rglob("*.lua")
}
FEATURES = sorted(name.removeprefix("features/") for name in TEXTS if name.startswith("features/"))
CORE = {name: text for name, text in TEXTS.items() if name.startswith("core/")}
NAME = r"(?<![.\w:])([A-Za-z_]\w*)\b"


def code(text: str) -> str:
    return re.sub(r"'[^'\n]*'", "''", re.sub(r"--.*", "", text))


def listed(pattern: str, text: str) -> set[str]:
    return {name.strip() for names in re.findall(pattern, text, re.MULTILINE) for name in names.split(",")}


def test_the_core_names_no_feature() -> None:
    assert len(FEATURES) >= 5
    words = "|".join(name.removesuffix("s") for name in FEATURES)
    named = re.compile(rf"(?<![a-z])(?:{words}|canary)s?(?![a-z])", re.IGNORECASE)
    assert {name: found for name, text in CORE.items() if (found := named.findall(text))} == {}
    assert [name for name, text in CORE.items() if "@include features/" in text] == []


def test_each_file_begins_with_what_it_needs() -> None:
    """Every script has core/common.lua, and a section of a feature has the definitions of the including script."""
    includes = {
        name: set(re.findall(r"^-- @include ([\w/]+)$", text, re.MULTILINE)) for name, text in TEXTS.items()
    }
    defined: dict[str, set[str]] = {}
    for file in set().union(*includes.values()) | {"core/hooks"}:
        for name in listed(r"^local (?:function )?([\w, ]+?)(?: =|\(|$)", code(TEXTS[file])):
            defined.setdefault(name, set()).add(file)
    lacking = {}
    for file, text in TEXTS.items():
        body = code(text)
        own = listed(r"\blocal (?:function )?([\w, ]+)", body) | listed(r"\bfunction[^(\n]*\(([^)]*)\)", body)
        own |= listed(r"\bfor ([\w, ]+) (?:in|=)", body)
        used = set(re.findall(NAME + r"(?!\s*=[^=])", body)) - own
        needed = {next(iter(defined[name])) for name in used & defined.keys() if len(defined[name]) == 1}
        missing = needed - includes[file] - {file, "core/common"}
        if missing and not file.startswith("features/"):
            lacking[file] = missing
    assert lacking == {}


def test_replies_may_grow() -> None:
    """A reply of more than three values is a map, and a shorter one may be extended: older clients ignore additions."""
    rigid = []
    for path in (ROOT / "producer" / "wire" / "calls").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            target, source = _unpacked(node)
            if not isinstance(target, ast.Tuple) or not _is_reply(source):
                continue
            if len(target.elts) > 4 or not isinstance(target.elts[-1], ast.Starred):
                rigid.append(f"{path.name}:{target.lineno}")
    assert rigid == []


def _unpacked(node: ast.AST) -> tuple[ast.AST | None, ast.AST | None]:
    """Return the target of an assignment or a loop, and the value that it unpacks."""
    if isinstance(node, ast.Assign):
        return node.targets[0], node.value
    if isinstance(node, ast.For | ast.comprehension):
        return node.target, node.iter
    return None, None


def _is_reply(source: ast.AST | None) -> bool:
    return isinstance(source, ast.Name) and source.id in {"reply", "row", "rows", "record"}
