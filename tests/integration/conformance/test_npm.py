"""Clients from npm use the gateway: openai, the AI SDK and langchain."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.conftest import ROOT
from tests.integration.conformance.environments import node_modules_with, outside
from tests.producer.gateway.serving import Served, gateway, served_worker
from tests.topologies import Certificates
from tests.webhook_receiver import Receiver
from tests.worker.harness import eventually, running_worker, worker_config

PACKAGES = (
    "openai@7.55.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@langchain/openai@1.6.0",
    "@langchain/core@1.4.0",
)  # fmt: skip
SCRIPT = Path(__file__).with_name("clients.mjs")


@pytest.fixture(scope="module")
def served(valkey_url: str) -> Iterator[Served]:
    with served_worker(valkey_url, model="echo", tool_call_parser="hermes") as served:
        yield served


def run(script: Path, served: Served, config: pytest.Config, folder: Path, **more: str) -> str:
    """Run a script next to the packages, with `more` variables; return its output."""
    packages = node_modules_with(config, *PACKAGES)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    variables = {"GATEWAY_URL": served.base_url, "PAGEMILL_MODEL": "echo", **more}
    done = subprocess.run(
        ["node", shutil.copy(script, folder)],
        cwd=folder,
        env=outside() | variables,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_clients_from_npm(served: Served, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    checks = re.findall(r'^  async "(.+)"\(\)', SCRIPT.read_text(), re.MULTILINE)
    assert run(SCRIPT, served, pytestconfig, tmp_path).splitlines() == checks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last_line"),
    [("openai", "completed Name a river."), ("ai-sdk", r"\{ sentiment: '(positive|negative)' \}")],
)
def test_the_examples_for_node(
    name: str, last_line: str, served: Served, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    printed = run(ROOT / "examples" / "node" / f"{name}.mjs", served, pytestconfig, tmp_path)
    assert "Name three colors." in printed
    assert re.fullmatch(last_line, printed.strip().splitlines()[-1])


@pytest.mark.slow
def test_openai_s_node_client_verifies_events(
    valkey_url: str,
    queue_name: str,
    pytestconfig: pytest.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificates = Certificates(tmp_path)
    monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, str(certificates.ca_file))
    receiver = Receiver(certificates)
    with (
        running_worker(worker_config(valkey_url, queue_name, model="echo")),
        gateway(valkey_url, queue_name, webhook_allow_private=True) as served,
        OpenAI(base_url=served.base_url, api_key="none") as client,
    ):
        hook = client.post("/webhook_endpoints", body={"url": receiver.url}, cast_to=dict[str, object])
        response = client.responses.create(model="echo", input="hi", background=True)
        eventually(lambda: receiver.received, "the event")
    receiver.close()
    events = json.dumps([(body.decode(), headers) for headers, body in receiver.received])
    monkeypatch.delenv(ssl.get_default_verify_paths().openssl_cafile_env)
    printed = run(
        SCRIPT.with_name("webhook.mjs"),
        served,
        pytestconfig,
        tmp_path,
        EVENTS=events,
        SECRET=str(hook["secret"]),
    )
    assert printed.split() == ["response.completed", response.id]
