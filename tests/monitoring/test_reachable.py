"""Every series that a worker exports from its first scrape on can be incremented: no unused label value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from pagemill.monitoring.counters import Counts, ObservationsBy, WorkerCounters
from tests.conftest import ROOT

DECLARING = {"monitoring/counters.py", "pagemill/common/error_codes.py"}
SHIPPED = ("worker", "engine", "monitoring", "producer/wire")
ANYTHING_ELSE = "other"
"""Counted if a value is none of the declared ones."""


def label_values(counter: Any) -> set[str]:
    return set(counter.read())


COUNTERS = {
    name: counter
    for name, counter in vars(WorkerCounters()).items()
    if isinstance(counter, Counts | ObservationsBy)
}


@cache
def nodes() -> list[ast.AST]:
    """All shipped code that may count, without declarations."""
    paths = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    sources = [path for path in paths if str(path.relative_to(ROOT)) not in DECLARING]
    return [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]


def literals(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def writes(name: str) -> list[ast.expr]:
    """The label arguments of the counting calls."""
    return [
        node.args[0]
        for node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("inc", "observe")
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == name
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTERS)
def test_every_label_value_has_a_writer(name: str) -> None:
    arguments = writes(name)
    assert arguments, "nothing counts it"
    counted = {value for argument in arguments for value in literals(argument)}
    if any(not list(literals(argument)) for argument in arguments):
        # The value comes from other code, some of which must produce it.
        counted |= {value for node in nodes() for value in literals(node)}
    assert label_values(COUNTERS[name]) - counted - {ANYTHING_ELSE} == set()
