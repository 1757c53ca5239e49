"""langchain's standard tests of chat models pass on the gateway, with a real model."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.conformance.environments import outside, python_with
from tests.producer.gateway.serving import served_worker

PACKAGES = ("langchain-tests==1.1.9", "langchain-openai==1.7.4")
EXPECTED_FAILURES = {
    "test_json_mode": "the model leaves out a field, which this mode allows",
    "test_agent_loop[model0]": "the model does not call a tool unless it must",
    "test_agent_loop[model1]": "the model does not call a tool unless it must",
}
PYTEST_INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = session
asyncio_default_test_loop_scope = session
"""
"""langchain reuses connections between tests."""
SUITE = Path(__file__).with_name("suite_langchain.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_langchains_standard_tests(valkey_url: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    python = python_with(pytestconfig, *PACKAGES)
    shutil.copy(SUITE, tmp_path)
    (tmp_path / "pytest.ini").write_text(PYTEST_INI)
    command = [python, "-m", "pytest", SUITE.name, "-q", "-rA", "--tb=short", "-p", "no:cacheprovider"]
    settings = {"model": "smollm2", "tool_call_parser": "hermes", "kv_cache_memory_bytes": 256 << 20}
    with served_worker(valkey_url, **settings) as served:
        done = subprocess.run(
            command, cwd=tmp_path, env=outside() | {"GATEWAY_URL": served.base_url},
            capture_output=True, text=True, timeout=3500, check=False,
        )  # fmt: skip
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::(test_\S+)", done.stdout, re.MULTILINE))
    assert failed == set(EXPECTED_FAILURES), done.stdout[-20_000:] + done.stderr[-5_000:]
    assert len(re.findall(r"^PASSED ", done.stdout, re.MULTILINE)) > 30, done.stdout
