"""No list of class names replaces a family's declaration."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import transformers

from tests.conftest import ROOT

SOURCES = sorted(path for folder in ("layers", "devices") for path in (ROOT / "engine" / folder).glob("*.py"))
_CLASS = re.compile(r"^class ([A-Z]\w*[a-z0-9]\w*[A-Z]\w*)", re.MULTILINE)


@cache
def classes_of_models() -> frozenset[str]:
    """Every class in transformers' models, except those whose names are plain words."""
    library = Path(transformers.__path__[0])
    files = [*library.glob("models/*/modeling_*.py"), *library.glob("*.py")]
    return frozenset(name for file in files for name in _CLASS.findall(file.read_text()))


def offences(source: str) -> list[str]:
    """Strings that name a class of a model, and queries of a class's name."""
    tree = ast.parse(source)
    named = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in classes_of_models()
    ]
    asked = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__")
    ]
    return named + asked


def test_layers_and_devices_know_no_class_of_a_model() -> None:
    found = {str(path): names for path in SOURCES if (names := offences(path.read_text()))}
    assert not found, f"let the family declare it, engine/layers/decoder_traits.py: {found}"


def test_a_list_that_comes_back_is_found() -> None:
    assert offences('KNOWN = ("LlamaAttention", "Qwen2Attention")') == ["LlamaAttention", "Qwen2Attention"]
    assert offences('if type(module).__name__.endswith("Attention"): pass') == ["type(module).__name__"]
    assert offences('"""A LLaMA."""\nclass Linear: ...') == []
