"""The stub files of the packages that load their public names on first use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import pagemill
import pagemill.producer


def declared(package: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the names that a package's stub exports, and the modules from which it imports them."""
    for node in ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text()).body:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            if alias.name == "*":
                yield from ((name, str(node.module)) for name in import_module(str(node.module)).__all__)
            else:
                assert alias.asname == alias.name, f"{alias.name}: only `X as X` exports a name of a stub"
                yield alias.name, str(node.module)


@pytest.mark.parametrize("package", [pagemill, pagemill.producer])
def test_a_stub_declares_the_public_names(package: ModuleType) -> None:
    stub = dict(declared(package))
    assert sorted(stub) == sorted(package.__all__)
    for name, module in stub.items():
        assert getattr(import_module(module), name) is getattr(package, name)
