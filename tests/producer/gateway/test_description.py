"""The gateway checked against its OpenAPI description by schemathesis: valid and invalid requests to all operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks

from pagemill.producer.gateway.openapi import description
from tests.producer.gateway.serving import gateway, write_keys
from tests.worker.harness import running_worker, worker_config

CHECKED = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "response_headers_conformance", "negative_data_rejection",
    "unsupported_method",
)  # fmt: skip


@pytest.fixture(scope="module")
def described(
    valkey_url: str, queue: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, str]]:
    path: Path = tmp_path_factory.mktemp("gateway") / "keys.json"
    keys = write_keys(path, tester={"tenant": "tester"})
    config = worker_config(valkey_url, queue, max_num_seqs=64)
    limits = {"timeout_s": 30.0, "max_tenant_files": 100_000, "max_tenant_batches": 100_000}
    with running_worker(config), gateway(valkey_url, queue, keys_path=path, **limits) as served:
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json"), keys["tester"]


OPERATIONS = [(method, path) for path, methods in description()["paths"].items() for method in methods]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_operation_is_as_described(
    described: tuple[Any, str], method: str, path: str, mode: GenerationMode
) -> None:
    schema, key = described
    wanted = [checks.CHECKS.get_one(name) for name in CHECKED]

    @settings(
        max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(headers={"authorization": f"Bearer {key}"}, checks=wanted)

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a list request without parameters cannot be invalid


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_operation_is_open(described: tuple[Any, str], method: str, path: str) -> None:
    """For every request, and before any of it is read."""
    url = described[0].location.removesuffix("/openapi.json") + path
    for headers in ({}, {"authorization": "Bearer pm-guess"}, {"authorization": "Basic eDp5"}):
        answer = httpx.request(method, url, headers=headers, content=b"{torn", timeout=60)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
