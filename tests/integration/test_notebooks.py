"""The notebooks, executed unchanged by a Jupyter kernel, against a worker with the packaged model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT, RedisServer, server_binary
from tests.worker.harness import running_worker, worker_config

pytestmark = pytest.mark.slow
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        RedisServer(server_binary("valkey-server"), tmp_path_factory.mktemp("notebooks")) as server,
        running_worker(worker_config(server.url, "default", model="smollm2", num_threads=1)),
    ):
        yield server.url


def execute(path: Path) -> dict[str, Any]:
    """Return the values of a notebook's last expressions, as text by the cell's id."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    values = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("data", {}).get("text/plain", output.get("text", ""))
            values[cell["id"]] = values.get(cell["id"], "") + text
    return values


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", redis_url)
    found = execute(path)
    text = json.dumps(found)
    expected = {
        "label_a_dataset": ["(4, 4, 0, 0)", "output_prob", "positive"],
        "serve_and_stream": ["Paris", "Rome"],
        "extract_to_columns": ["ticket.product", "laptop", "bool", "int64"],
    }[path.stem]
    for part in expected:
        assert part in text, f"{part} is not in the outputs of {path.name}: {text}"
