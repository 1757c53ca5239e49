"""Adapters from a hub on loopback, each in a separate process: the library reads its settings at import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import run_python
from tests.hub_server import Repository, running_hub

OBTAIN = """
import sys
from pagemill.engine.adapters.source import obtain_adapter
from pagemill.engine.errors import EngineError

try:
    print(obtain_adapter(sys.argv[1]))
except EngineError as error:
    print(type(error).__name__, error)
"""
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "optimizer.pt": b"a pickle"}


def obtain(url: str, home: Path, source: str) -> str:
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    run = run_python("-c", OBTAIN, source, env=environment, check=True)
    return run.stdout.strip()


@pytest.mark.slow
def test_only_the_adapter_arrives_and_a_copy_has_to_do(tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.repositories["org/lora"] = Repository(FILES)
        folder = Path(obtain(hub.url, tmp_path, "org/lora"))
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
            name: FILES[name] for name in ("adapter_config.json", "adapter_model.safetensors")
        }
        assert obtain(hub.url, tmp_path, "org/other").startswith("AdapterError")
        url = hub.url
    assert Path(obtain(url, tmp_path, "org/lora")) == folder, "the hub is away"


def test_what_names_neither_a_folder_nor_a_repository(tmp_path: Path) -> None:
    for source in ("lora", "/no/such/folder", "./lora"):
        assert (
            obtain("http://127.0.0.1:9", tmp_path, source) == f"AdapterError folder {source!r} does not exist"
        )
    assert "neither a folder nor a repository" in obtain(
        "http://127.0.0.1:9", tmp_path, "modelscope:org/lora"
    )
