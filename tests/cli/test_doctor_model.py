"""`pagemill doctor --model`: how a local worker would run a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from pagemill.cli import doctor as cli_doctor
from pagemill.cli.app import app
from pagemill.engine.builder import describe_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ModelLoadError
from pagemill.producer.doctor.machine_checks import http_port
from pagemill.worker.engine_host.loop import load
from tests.engine.tiny_model import save_tiny_llama
from tests.worker.harness import running_worker, worker_config


def finding(model: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return only the finding on the model."""
    monkeypatch.setattr(cli_doctor, "examine", lambda *_: ([], True))
    document = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--model", model]).stdout)
    (only,) = document["findings"]
    assert isinstance(only, dict)
    return only


def test_it_repeats_what_a_start_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_SKIP_TOKENIZER_INIT", "true")
    save_tiny_llama(tmp_path)
    found = finding(str(tmp_path), monkeypatch)
    told = describe_model(EngineConfig(model=str(tmp_path)))
    assert (found["check"], found["level"]) == ("model parts", "ok")
    assert found["message"] == f"{tmp_path}: {told}"
    assert "forward pass" in told


@pytest.mark.slow
def test_it_asks_the_running_worker(tmp_path: Path, valkey_url: str, queue_name: str) -> None:
    save_tiny_llama(tmp_path)
    settings = {"model": str(tmp_path), "num_kv_blocks": 64, "skip_tokenizer_init": True}
    with running_worker(worker_config(valkey_url, queue_name, **settings)) as worker:
        found = http_port(urlsplit(worker.http_url or "").port or 0)
        parts = worker.engine.engine.model_parts
    assert parts == describe_model(EngineConfig(model=str(tmp_path)))
    assert found.message.endswith(f"{tmp_path.name}; {parts}")


@pytest.mark.slow
def test_files_that_a_start_would_refuse_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same errors as at startup: for a missing tokenizer, and for truncated weights."""
    save_tiny_llama(tmp_path)
    config = EngineConfig(model=str(tmp_path), num_kv_blocks=8)
    found = finding(str(tmp_path), monkeypatch)
    with pytest.raises(ModelLoadError) as refused:
        load(config)
    assert (found["level"], found["message"]) == ("error", str(refused.value))
    assert "has no tokenizer" in found["message"]
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    found = finding(str(tmp_path), monkeypatch)
    with pytest.raises(ModelLoadError) as refused:
        load(config)
    assert (found["level"], found["message"]) == ("error", str(refused.value))
    assert "download it again" in found["message"]


def test_a_model_that_no_worker_would_take_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    found = finding(str(tmp_path), monkeypatch)
    assert found["level"] == "error"
    assert "resnet" in found["message"]


def test_echo_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("echo", monkeypatch)["level"] == "note"
