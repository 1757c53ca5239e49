"""clients/typescript: its types follow from the Python declarations, and its build is strict.

`python -m tests.producer.test_typescript` rewrites the types.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import ErrorInfo, Result
from tests.producer.conftest import NODE_CLIENT

TYPES = NODE_CLIENT / "src/types.ts"
UNSUPPORTED = (
    "adapter", "after", "beam_width", "best_of", "continuations", "dedupe", "dimensions", "documents", "inputs",
    "on_parent_failure", "prompt_name", "revision", "rows_dtype", "task", "truncate", "when",
)  # fmt: skip
"""Fields of jobs that need more of the header than the client writes."""


def type_of(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as a TypeScript type."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].lstrip("_")
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(type_of, options)))
    if "const" in schema or "enum" in schema:
        return " | ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(map(type_of, schema['prefixItems']))}]"
        case "array":
            item = type_of(schema.get("items", {}))
            return f"({item})[]" if " " in item else f"{item}[]"
        case "object":
            value = schema.get("additionalProperties")
            return f"Record<string, {type_of(value) if isinstance(value, Mapping) else 'unknown'}>"
        case "integer" | "number":
            return "number"
        case "string" | "boolean" | "null" as kind:
            return str(kind)
    return "unknown"


def interface(name: str, schema: Mapping[str, Any]) -> str:
    """Return an object's schema as an interface."""
    required = schema.get("required", ())
    fields = [
        f"  {field}{'' if field in required else '?'}: {type_of(of)};"
        for field, of in schema["properties"].items()
    ]
    return "\n".join([f"export interface {name.lstrip('_')} {{", *fields, "}"])


def types() -> str:
    """Return the content of types.ts."""
    found: dict[str, Any] = {}
    for model in (Job, Result, ErrorInfo):
        schema = model.model_json_schema(mode="validation")
        found |= schema.pop("$defs", {}) | {model.__name__: schema}
    job = found["Job"]
    job["properties"] = {name: of for name, of in job["properties"].items() if name not in UNSUPPORTED}
    used = _reachable(found, ["Job", "Result", "ErrorInfo"])
    parts = [
        "// Generated from the declarations of the Python package: python -m tests.producer.test_typescript",
        *(interface(name, found[name]) for name in sorted(used)),
        "/** Fields of jobs that this client refuses. */\n"
        f"export const UNSUPPORTED = {json.dumps(UNSUPPORTED)};",
    ]
    return "\n\n".join(parts) + "\n"


def _reachable(found: Mapping[str, Any], names: list[str]) -> set[str]:
    seen: set[str] = set()
    while names:
        if (name := names.pop()) not in seen:
            seen.add(name)
            text = json.dumps(found[name])
            names += [other for other in found if f'"#/$defs/{other}"' in text]
    return seen


def test_the_types_follow_from_the_declarations() -> None:
    assert TYPES.read_text() == types(), "run: python -m tests.producer.test_typescript"


def test_every_unsupported_field_is_one_of_a_job() -> None:
    assert set(UNSUPPORTED) < Job.model_fields.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "error"),
    [
        ('{ model: "m", prompt: "p", max_tokens: 3 }', None),
        (
            '{ model: "m", messages: [{ role: "user", content: "hi" }], response_format: 1 }',
            "response_format",
        ),
        ('{ model: "m", prompt: "p", max_tokens: "3" }', "not assignable to type 'number"),
        ('{ prompt: "p" }', "'model' is missing"),
        ('{ model: "m", prompt: "p", after: {} }', "after"),
    ],
)
def test_the_compiler_finds_a_wrong_field(node_client: Path, job: str, error: str | None) -> None:
    source = node_client / "src" / "check.ts"
    source.write_text(f'import type {{ Job }} from "./types.js";\nexport const job: Job = {job};\n')
    try:
        done = subprocess.run(
            ["npx", "tsc", "--noEmit"], cwd=node_client, capture_output=True, text=True, check=False
        )
    finally:
        source.unlink()
    if error is None:
        assert done.returncode == 0, done.stdout
    else:
        assert error in done.stdout


@pytest.mark.slow
def test_an_unsupported_field_is_refused_at_run_time(node_client: Path) -> None:
    script = (
        'import { Pagemill } from "./dist/client.js";'
        'const queue = new Pagemill({ evalSha() { throw new Error("sent"); } }, "q");'
        'await queue.submit({ model: "m", prompt: "p", after: "a" }).catch((error) => console.log(error.code));'
    )
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, cwd=node_client, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "unsupported"


if __name__ == "__main__":
    TYPES.write_text(types())
