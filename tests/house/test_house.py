"""Project rules that linters do not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_python

PARTS = ("producer", "engine", "kernels", "worker", "monitoring")
SOURCE_FOLDERS = ("pagemill", *PARTS)
SOURCES = sorted(path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
EVERYTHING = sorted(
    {*SOURCES, *(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))}
)

MAX_LINES = 700
MAX_FUNCTION_LINES = 70
"""Outside kernels/: a compiled function is one loop nest, and its extracted parts are compiled into it again."""

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "stuff"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_files_are_named_and_short() -> None:
    vague = [name(path) for path in SOURCES if path.stem in VAGUE_NAMES]
    assert not vague, f"vague names: {vague}"
    long = [name(path) for path in SOURCES if path.read_text().count("\n") > MAX_LINES]
    assert not long, f"more than {MAX_LINES} lines, split them: {long}"


@pytest.mark.slow
def test_a_function_fits_a_screen() -> None:
    paths = [path for path in EVERYTHING if ROOT / "kernels" not in path.parents]
    long = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in paths
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long, f"more than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.slow
def test_every_module_says_what_it_owns() -> None:
    silent = [path for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert not silent, f"no module docstring: {[name(path) for path in silent]}"


def test_kernels_is_a_bare_docstring() -> None:
    """transformers checks for a package of that name: Pagemill's must not offer any of its names."""
    (statement,) = ast.parse((ROOT / "kernels/__init__.py").read_text()).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)


def test_every_folder_with_code_is_a_package() -> None:
    """The wheel contains only packages."""
    bare = {path.parent for path in SOURCES if not (path.parent / "__init__.py").is_file()}
    assert not bare


@pytest.mark.parametrize("part", PARTS)
def test_a_bare_name_is_refused(part: str) -> None:
    run = run_python("-c", f"import {part}.config", cwd=ROOT)
    assert run.returncode == 1
    assert f"import pagemill.{part}" in run.stderr


FOREIGN = {"os", "torch", "dist", "channel", "kernel", "compiled", "module_class", "celery_log"}
"""Names that access private parts of other libraries."""


def foreign_privates(path: Path) -> Iterator[str]:
    """Private attributes of objects whose class is not in the file."""
    nodes = list(ast.walk(parsed(path)))
    own = {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    own |= {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in own:
            root = ast.unparse(node).partition(".")[0]
            if root not in FOREIGN and not (isinstance(node.value, ast.Name) and root in ("self", "cls")):
                yield f"{name(path)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.slow
def test_no_private_attribute_is_reached_across_modules() -> None:
    assert [found for path in SOURCES for found in foreign_privates(path)] == []


SHARED = ("pagemill.common.",)


def test_the_wire_contract_stands_alone() -> None:
    """`pagemill.producer.wire` is imported by workers: it must not import the rest of the producer, or any
    other code of Pagemill except the plain modules that all sides share."""
    outward = [
        f"{name(path)}:{node.lineno}: {name}"
        for path in (ROOT / "producer/wire").rglob("*.py")
        for node in ast.walk(parsed(path))
        for name in imported_names(node)
        if name.startswith("pagemill.") and not (name + ".").startswith(("pagemill.producer.wire.", *SHARED))
    ]
    assert not outward


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        return [node.module or ""]
    return []


def test_scheduling_runs_where_torch_cannot_be_imported() -> None:
    modules = [
        ".".join(("pagemill", *path.relative_to(ROOT).with_suffix("").parts))
        for path in (ROOT / "engine/scheduling").rglob("*.py")
        if path.stem != "__init__"
    ]
    assert modules
    program = f"import sys; sys.modules['torch'] = None; import pagemill.engine.outputs, {', '.join(modules)}"
    run = run_python("-c", program, cwd=ROOT)
    assert run.returncode == 0, run.stderr
