"""Recipes in YAML files, with the line numbers of errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.step import RecipeInvalid
from pagemill.producer.dataset.tables.rows import open_source

SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 4 << 20
MAX_EXAMPLES = 256


def read_recipe(path: Path) -> Chain:
    """Return the steps of a recipe. Raises DatasetError with the line of the error."""
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > MAX_BYTES:
            raise DatasetError(f"{path}: a recipe has at most {MAX_BYTES >> 20} MiB")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        given = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise DatasetError(f"{path}{line}: {getattr(error, 'problem', None) or error}") from None
    try:
        _check_repeated(tree, path)
        return Chain.from_steps(_with_examples(given, path.parent))
    except RecipeInvalid as error:
        raise DatasetError(f"{path}, line {_line(tree, error.place)}: {error}") from None


def _with_examples(given: Any, folder: Path) -> Any:
    """Return a recipe with the rows of the example files that it names, relative to its folder."""
    steps = given.get("steps") if isinstance(given, Mapping) else None
    if not isinstance(steps, list):
        return given
    return {**given, "steps": [_loaded(step, index, folder) for index, step in enumerate(steps)]}


def _loaded(step: Any, index: int, folder: Path) -> Any:
    if not isinstance(step, Mapping) or not isinstance(step.get("examples"), str):
        return step
    rows: list[dict[str, Any]] = []
    try:
        for row in open_source(folder / step["examples"]).rows():
            if row.fields is None or len(rows) == MAX_EXAMPLES:
                reason = row.error.message if row.error else f"more than {MAX_EXAMPLES} examples"
                raise DatasetError(f"{step['examples']}: row {row.number}: {reason}")
            rows.append(row.fields)
    except DatasetError as error:
        raise RecipeInvalid(f"examples: {error}", "steps", index, "examples") from None
    return {**step, "examples": rows}


def _check_repeated(node: yaml.Node | None, path: Path, depth: int = 0) -> None:
    """Raise DatasetError for a repeated key in a mapping, of which YAML would use the last."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise DatasetError(f"{path}, line {key.start_mark.line + 1}: {key.value} is there twice")
            seen.add(key.value)
    if depth < 4 and isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        for child in node.value:
            _check_repeated(child[1] if isinstance(child, tuple) else child, path, depth + 1)


def _line(node: yaml.Node | None, place: tuple[str | int, ...]) -> int:
    """Return the line of the innermost existing node on the path to a place."""
    line = 1 if node is None else node.start_mark.line + 1
    for step in place:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = (node.value[step], node.value[step])
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
