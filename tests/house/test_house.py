"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PARTS = ("producer", "engine", "kernels", "worker", "monitoring")
SOURCE_FOLDERS = ("pagemill", *PARTS)
SOURCES = sorted(path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
EVERYTHING = sorted(
    {*SOURCES, *(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))}
)

MAX_LINES = 500
MAX_FILES = 20
MAX_FUNCTION_LINES = 70
"""Outside kernels/: a compiled function is one loop nest, and what is cut out of it is compiled into it again."""

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "stuff"}


def run_python(statement: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", statement], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_noun_per_file(path: Path) -> None:
    assert path.stem not in VAGUE_NAMES
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: split it at a noun"


def test_a_folder_is_taken_in_at_a_glance() -> None:
    crowded = {
        folder: count
        for folder, count in Counter(path.parent for path in EVERYTHING).items()
        if count > MAX_FILES
    }
    assert not crowded, f"more than {MAX_FILES} files: {crowded}"


@pytest.mark.slow
def test_a_function_fits_a_screen() -> None:
    paths = [path for path in EVERYTHING if ROOT / "kernels" not in path.parents]
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long, f"more than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.slow
def test_every_module_says_what_it_owns() -> None:
    silent = [path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, f"no module docstring: {[str(path.relative_to(ROOT)) for path in silent]}"


def test_kernels_is_a_bare_docstring() -> None:
    """transformers probes for a package of that name: ours must offer nothing that looks like it."""
    (statement,) = ast.parse((ROOT / "kernels/__init__.py").read_text()).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)


def test_every_folder_with_code_is_a_package() -> None:
    """The wheel holds packages alone."""
    bare = {path.parent for path in SOURCES if not (path.parent / "__init__.py").is_file()}
    assert not bare


@pytest.mark.parametrize("name", PARTS)
def test_a_bare_name_is_refused(name: str) -> None:
    run = run_python(f"import {name}.config")
    assert run.returncode == 1
    assert f"import pagemill.{name}" in run.stderr


FOREIGN = {"os", "torch", "dist", "channel", "kernel", "compiled", "module_class"}
"""Names under which parts of other libraries are reached that have no public name."""


def foreign_privates(path: Path) -> Iterator[str]:
    """Private attributes of objects whose class is not in the file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
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
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.slow
def test_no_private_attribute_is_reached_across_modules() -> None:
    assert [found for path in SOURCES for found in foreign_privates(path)] == []


SHARED = (
    "pagemill.bounds.",
    "pagemill.error_codes.",
    "pagemill.fingerprint.",
    "pagemill.chat.",
    "pagemill.json_values.",
    "pagemill.sampling_fields.",
    "pagemill.structured_outputs.",
)


def test_the_wire_contract_stands_alone() -> None:
    """`pagemill.producer.wire` is what a worker imports: nothing in it may reach for the rest of the producer, nor
    for anything else of ours but the plain modules that all sides share."""
    outward = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in (ROOT / "producer/wire").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
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
    run = run_python(
        f"import sys; sys.modules['torch'] = None; import pagemill.engine.outputs, {', '.join(modules)}"
    )
    assert run.returncode == 0, run.stderr
