"""Placeholders in a template for the outputs of other steps: `{{ label.text }}`.

A template is rendered before those outputs are known. A placeholder then prints a mark that cannot occur in a row, and
`fill` replaces the marks by the queue's placeholders (docs/dependencies.md), or by known outputs.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping

from jinja2 import nodes

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.templates import ParentOutput, escape_places, places

_NONCE = secrets.token_hex(8)
_MARK = re.compile(f"<{_NONCE}:([^>]*)>")


class StepPlace:
    """A step's name in a template. Its fields print as marks."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> StepPlace:
        if name.startswith("_"):
            raise AttributeError(name)
        return StepPlace(f"{self._path}.{name}")

    def __getitem__(self, name: str) -> StepPlace:
        return StepPlace(f"{self._path}.{name}")

    def __str__(self) -> str:
        return f"<{_NONCE}:{self._path}>"


def placed(tree: nodes.Template, names: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return each of `names` that a template prints, with the printed field.

    Raises:
        DatasetError: the template uses a name otherwise than to print it, or the field does not exist.
    """
    printed = dict(_printed(tree, names))
    for node in tree.find_all(nodes.Name):
        if node.name in names and node.ctx == "load" and id(node) not in printed:
            raise DatasetError(
                f"the template's line {node.lineno}: {node.name} is a step, whose output is not known when the "
                f"template is rendered: print it as it is, {{{{ {node.name}.text }}}}; `when` decides what runs"
            )
    for path, line in printed.values():
        name, _, field = path.partition(".")
        if list(places(f"{{{path}}}")) != [(name, field)]:
            raise DatasetError(
                f"the template's line {line}: a step's output has text, label, label_prob and parsed, not {field}"
            )
    return frozenset((path.partition(".")[0], path.partition(".")[2]) for path, _ in printed.values())


def _printed(tree: nodes.Template, names: Collection[str]) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield the node, path and line of each name that is alone, with fields, in a pair of braces."""
    for output in tree.find_all(nodes.Output):
        for node in output.nodes:
            fields: list[str] = []
            inner: nodes.Node = node
            while isinstance(inner, nodes.Getattr | nodes.Getitem):
                if isinstance(inner, nodes.Getattr):
                    fields.insert(0, inner.attr)
                elif isinstance(inner.arg, nodes.Const):
                    fields.insert(0, str(inner.arg.value))
                else:
                    break
                inner = inner.node
            if fields and isinstance(inner, nodes.Name) and inner.name in names:
                yield id(inner), (".".join([inner.name, *fields]), inner.lineno)


def fill(text: str, known: Mapping[str, ParentOutput], *, is_waiting: bool) -> str:
    """Return a rendered text with the known outputs in it.

    Args:
        is_waiting: The job waits for others: remaining marks become placeholders, and the rest is text.

    Raises:
        InvalidJob: a known output does not have a field, or braces around a placeholder change it.
    """
    left: list[tuple[str, str]] = []

    def filled(match: re.Match[str]) -> str:
        name, _, field = match[1].partition(".")
        if name in known:
            return known[name].field(field)
        left.append((name, field))
        return match[0]

    text = _MARK.sub(filled, text)
    if not is_waiting:
        return text
    text = _MARK.sub(r"{\1}", escape_places(text))
    if list(places(text)) != left:
        raise InvalidJob(
            "a place for a step's output has braces on both sides; put a space between", param="prompt"
        )
    return text
