"""Docstrings of the Python reference: Google style, complete, and equal for the asyncio counterparts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.conftest import ROOT
from tests.house.test_house import name, parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef

NOT_IN_THE_REFERENCE = {"run_flow", "iterate_flow"}
"""As in mkdocs.yml."""
ERROR_MODULES = {"errors", "base_error", "bounds"}
"""Pagemill constructs these objects; their classes describe the attributes."""
TWINS = {
    "producer/client/sync.py": "producer/client/aio.py",
    "producer/client/handles.py": "producer/client/aio_handles.py",
    "producer/client/rollout/handles.py": "producer/client/rollout/handles.py",
}


class Described(NamedTuple):
    place: str
    function: Function
    doc: str


def referenced() -> Iterator[tuple[str, str]]:
    """Yield the files that the reference documents, and the name in each; empty: all public ones."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for dotted in re.findall(r"^::: pagemill\.([\w.]+)$", page.read_text(), re.MULTILINE):
            module, _, last = dotted.rpartition(".")
            if (ROOT / f"{dotted.replace('.', '/')}.py").is_file():
                yield f"{dotted.replace('.', '/')}.py", ""
            elif (ROOT / f"{module.replace('.', '/')}.py").is_file():
                yield f"{module.replace('.', '/')}.py", last
            else:
                yield f"pagemill/{module.replace('.', '/')}.py", last


def described() -> Iterator[Described]:
    """Yield the public functions and methods of the reference, with their docstrings."""
    for file, wanted in referenced():
        path = ROOT / file
        for node in parsed(path).body:
            is_public = isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
            if not is_public or (wanted and node.name != wanted):
                continue
            if isinstance(node, ast.ClassDef):
                yield from of_class(name(path), node, with_init=path.stem not in ERROR_MODULES)
            else:
                yield Described(f"{name(path)}: {node.name}", node, ast.get_docstring(node) or "")


def of_class(file: str, node: ast.ClassDef, *, with_init: bool) -> Iterator[Described]:
    for member in node.body:
        if not isinstance(member, Function) or member.name in NOT_IN_THE_REFERENCE:
            continue
        doc = ast.get_docstring(member) or ""
        if member.name == "__init__":
            if with_init and "producer" not in parameters(member):  # a producer creates such an object
                yield Described(f"{file}: {node.name}", member, (ast.get_docstring(node) or "") + doc)
        elif not member.name.startswith("_") and not any(
            ast.unparse(decorator).endswith(".setter") for decorator in member.decorator_list
        ):
            yield Described(f"{file}: {node.name}.{member.name}", member, doc)


def parameters(function: Function) -> list[str]:
    given = function.args
    extra = [each for each in (given.vararg, given.kwarg) if each is not None]
    listed = [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]
    return [each.arg for each in listed if each.arg not in ("self", "cls")]


def lacking(function: Function, doc: str) -> Iterator[str]:
    """Yield the missing parts of a docstring."""
    if re.search(r"\bRaises `?[A-Z]", doc):
        yield "Raises as a section"
    names = parameters(function)
    if not names:
        return
    if missing := [each for each in names if not re.search(rf"^ +\**{each}:", doc, re.MULTILINE)]:
        yield f"Args: {', '.join(missing)}"
    returns = ast.unparse(function.returns) if function.returns else "None"
    if returns != "None" and not re.search(r"^(?:Returns|Yields):$", doc, re.MULTILINE):
        yield "Returns"
    if "\nRaises:\n" not in doc and any(
        isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) for node in ast.walk(function)
    ):
        yield "Raises"


def test_public_functions_have_full_docstrings() -> None:
    found = list(described())
    assert len(found) > 60
    offenses = [f"{each.place}: {what}" for each in found for what in lacking(each.function, each.doc)]
    silent = [each.place for each in found if not each.doc]
    assert not offenses + silent, "\n".join(offenses + silent)


def docs_of(file: str, prefix: str) -> dict[str, str | None]:
    classes = [node for node in parsed(ROOT / file).body if isinstance(node, ast.ClassDef)]
    return {
        f"{node.name.removeprefix(prefix)}.{member.name}": ast.get_docstring(member)
        for node in classes
        if node.name.startswith(prefix) and not node.name.removeprefix(prefix).startswith("Async")
        for member in node.body
        if isinstance(member, Function) and not member.name.startswith("_")
    }


def test_the_asyncio_twin_has_the_same_docstring() -> None:
    compared = 0
    for threads, asyncio in TWINS.items():
        originals = docs_of(threads, "")
        for method, doc in docs_of(asyncio, "Async").items():
            assert doc == originals[method], f"copy the docstring of {method} from {threads} to {asyncio}"
            compared += 1
    assert compared > 30


def test_both_producers_list_the_same_options() -> None:
    texts = [(ROOT / "producer" / "client" / f"{each}.py").read_text() for each in ("base", "sync", "aio")]
    base, *others = (re.search(r"\n    Args:\n.*?\n    \"\"\"", text, re.DOTALL) for text in texts)
    assert base is not None
    assert [other and other[0] for other in others] == [base[0]] * 2
