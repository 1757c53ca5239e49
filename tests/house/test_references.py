"""Files, folders and modules named in pages, docstrings, comments and settings exist."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PARTS = "producer|engine|kernels|worker|monitoring"
PATH = re.compile(r"(?<![\w/.:@<>*{}-])((?:[\w-]+/)*[\w-]+\.(?:py|lua|toml|md|yml|js|j2))(?![\w/(])")
FOLDER = re.compile(
    rf"(?<![\w/.:-])((?:pagemill|{PARTS}|benchmarks|tests|docs|deploy|examples)/(?:[\w-]+/)*)(?![\w*{{])"
)
MODULE = re.compile(r"(?<![\w./-])((?:pagemill|benchmarks|tests)(?:\.\w+)+)(?![\w/-])")
IMPORT = re.compile(
    r"from ((?:pagemill|benchmarks|tests)[\w.]*) import (\w+(?: as \w+)?(?:, *\w+(?: as \w+)?)*)"
)
BARE = re.compile(rf"(?:\bfrom|\bimport(?: \w+,)*|-m) (?:{PARTS})(?:[.,;]|\s(?!is|of))")
CALL = re.compile(rf"\b(?:files|find_spec|import_module|importorskip)\(\"(?:{PARTS})\b.*")
THEIRS = {
    "queries.yml", "test.yml", "2e/logging.py", "benchmarks.no_such_module",
}  # fmt: skip
"""A container's, and names that tests invent."""
FILES_OF_NO_MODULE = re.compile(r"\.(?:toml|json|log|jsonl|prom|key)$")


def tracked() -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


FILES = {name for name in tracked() if (ROOT / name).is_file()}
FOLDERS = {str(parent) for name in FILES for parent in Path(name).parents}
ENDINGS = {name.split("/", n)[n] for name in FILES for n in range(name.count("/") + 1)}
"""A page may name a file by the end of its path."""
READ = sorted(
    name
    for name in FILES
    if name.endswith((".py", ".md", ".lua", ".toml", ".yml", "Makefile", "Dockerfile", "run"))
    and not (ROOT / name).is_symlink()
    and Path(name).stem
    not in ("test_references", "test_installed", "test_runner")  # they name files that do not exist
)


def prose(name: str) -> Iterator[tuple[int, str]]:
    """Line numbers and text; for a program only strings and comments."""
    text = (ROOT / name).read_text()
    if not name.endswith(".py"):
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names that a module defines or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name():
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
    return frozenset(names)


def is_there(dotted: str) -> bool:
    """A module, or a name in one."""
    top, *rest = dotted.split(".")
    place = ROOT / top
    for number, part in enumerate(rest):
        if (place / part).is_dir():
            place = place / part
            continue
        if (module := place / f"{part}.py").is_file():
            return number == len(rest) - 1 or rest[number + 1] in names_in(module)
        return part in names_in(place / "__init__.py") or (top == "pagemill" and place == ROOT / top)
    return True


def missing(name: str) -> Iterator[str]:
    for call in CALL.findall((ROOT / name).read_text()):
        yield f"0: {call} names a folder, not the package"
    for line, text in prose(name):
        for path in PATH.findall(text):
            if path not in ENDINGS | THEIRS and not (ROOT / name).parent.joinpath(path).exists():
                yield f"{line}: no file {path}"
        for folder in FOLDER.findall(text):
            if str((ROOT / folder).resolve().relative_to(ROOT)) not in FOLDERS:
                yield f"{line}: no folder {folder}"
        for module in MODULE.findall(text):
            if module not in THEIRS and not is_there(module) and not FILES_OF_NO_MODULE.search(module):
                yield f"{line}: no module {module}"
        for module, imported in IMPORT.findall(text):
            for each in re.sub(r" as \w+", "", imported).replace(" ", "").split(","):
                if not is_there(f"{module}.{each}"):
                    yield f"{line}: no {each} in {module}"
        if match := BARE.search(text):
            yield f"{line}: {match.group()!r} names a folder, not the package"


def test_what_is_named_is_there() -> None:
    dangling = [f"{name}:{line}" for name in READ for line in missing(name)]
    assert not dangling, "\n".join(dangling)
