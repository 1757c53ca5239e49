"""docs/schemas: JSON Schemas of the files that users write; `python -m tests.cli.test_schemas` rewrites them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError, validate
from pydantic import TypeAdapter

from pagemill.producer.dataset.steps.chain import MAX_STEPS, Chain
from pagemill.producer.dataset.steps.recipe_file import MAX_EXAMPLES
from pagemill.producer.dataset.steps.step import JOB_KEYS, OWN_KEYS, STEP_KEYS
from pagemill.producer.gateway.api_keys import ApiKey, _KeyFile, add_key, new_key, read_keys
from pagemill.producer.wire.schema.dependencies import Condition
from pagemill.producer.wire.schema.job import Job
from pagemill.supervisor.settings import UpSettings
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "schemas"
ADDRESS = "https://pagemill.readthedocs.io/en/latest/schemas"
NAMES = ("recipe", "up", "keys")
TEXT = {"type": "string"}


def or_one(field: dict[str, Any]) -> dict[str, Any]:
    """Allow one text where a list of texts is expected, as the fields of jobs do."""
    kinds = field.get("anyOf", [field])
    is_list = any(kind.get("type") == "array" and kind["items"].get("type") == "string" for kind in kinds)
    return field | {"anyOf": [*kinds, TEXT]} if "anyOf" in field and is_list else field


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe: its own keys, and the job fields that a step may have."""
    job = Job.model_json_schema()
    when = TypeAdapter(dict[str, Condition | str | list[str]]).json_schema()
    conditions = when["$defs"]["Condition"]["properties"]
    conditions |= {name: or_one(conditions[name]) for name in conditions}
    fields = job["properties"]
    fields["stop"] = {"anyOf": [fields["stop"], TEXT]}
    shared = {name: fields.get(name, {}) for name in sorted(JOB_KEYS)} | {
        "model": TEXT, "system": TEXT, "chat": {"type": "boolean"}, "choices": {"type": "array", "items": TEXT},
        "json_schema": {"type": ["object", "boolean", "string"]}, "regex": TEXT,
    }  # fmt: skip
    rows = {"type": "array", "items": {"type": "object"}, "maxItems": MAX_EXAMPLES}
    own = {
        "name": TEXT, "prompt": TEXT, "column": TEXT, "gold": TEXT,
        "after": {"type": ["array", "string"], "items": TEXT},
        "when": {"type": "object", "additionalProperties": when["additionalProperties"]},
        "examples": {"anyOf": [rows, TEXT]},
    }  # fmt: skip
    assert set(shared) == STEP_KEYS
    assert set(own) == OWN_KEYS
    step = {
        "type": "object", "properties": own | shared, "required": ["name", "prompt"], "additionalProperties": False,
    }  # fmt: skip
    return {
        "type": "object",
        "properties": {
            "model": TEXT,
            "defaults": {"type": "object", "properties": shared, "additionalProperties": False},
            "steps": {"type": "array", "items": step, "minItems": 1, "maxItems": MAX_STEPS},
        },
        "required": ["steps"],
        "additionalProperties": False,
        "$defs": job["$defs"] | when["$defs"],
    }


def schema(name: str) -> dict[str, Any]:
    match name:
        case "recipe":
            found = recipe_schema()
        case "up":
            found = UpSettings.model_json_schema()
        case _:
            found = _KeyFile.model_json_schema()
    heading = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{ADDRESS}/{name}.schema.json",
    }
    return heading | found | {"title": f"{name} file of Pagemill"}


def path(name: str) -> Path:
    return FOLDER / f"{name}.schema.json"


def text(name: str) -> str:
    return json.dumps(schema(name), indent=1) + "\n"


def examples() -> dict[str, Any]:
    """The files that the pages and deploy/ show, by schema."""
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)
    (keys,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/gateway.md").read_text(), re.DOTALL)
    up = (ROOT / "deploy/systemd/up.toml").read_text()
    assert f"$schema={ADDRESS}/recipe.schema.json" in recipe
    assert up.startswith(f"#:schema {ADDRESS}/up.schema.json\n")
    given = json.loads(keys.replace("<64 hex digits>", "0" * 64))
    assert given["$schema"] == f"{ADDRESS}/keys.schema.json"
    return {"recipe": yaml.safe_load(recipe), "up": tomllib.loads(up), "keys": given}


def test_the_committed_schemas_are_current() -> None:
    stale = [name for name in NAMES if not path(name).exists() or path(name).read_text() != text(name)]
    assert stale == [], "run python -m tests.cli.test_schemas"


def test_the_examples_are_valid() -> None:
    for name, given in examples().items():
        Draft202012Validator.check_schema(schema(name))
        validate(given, schema(name))
    Chain.from_steps(examples()["recipe"])
    UpSettings.model_validate(examples()["up"])


def test_a_misspelt_key_is_invalid() -> None:
    for name, given in examples().items():
        with pytest.raises(ValidationError, match="modle"):
            validate(given | {"modle": "x"}, schema(name))


def test_a_key_file_keeps_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(examples()["keys"]))
    add_key(file, ApiKey(name="second", sha256=new_key()[1]))
    assert json.loads(file.read_text())["$schema"] == f"{ADDRESS}/keys.schema.json"
    assert sorted(key.name for key in read_keys(file).values()) == ["second", "shop"]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in NAMES:
        path(each).write_text(text(each), encoding="utf-8")
