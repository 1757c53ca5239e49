"""A worker whose model cannot be loaded reports it in one line and leaves the queue unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.engine.models.families.native_cases import LLAMA, write_llama
from tests.engine.models.families.tiny import native_checkpoint
from tests.worker.harness import PATIENCE_S, QueueClient


class Hostile:
    def __init__(self, directory: Path) -> None:
        self._mark = directory / "ran"

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def hostile(directory: Path) -> None:
    (write_llama(directory) / "model.safetensors").unlink()
    torch.save({"a": Hostile(directory)}, directory / "pytorch_model.bin")


def truncated(directory: Path) -> None:
    native_checkpoint(LLAMA).write(directory, num_shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (hostile, "asks for posix.system, which weights don't need"),
        (truncated, "model-00002-of-00002.safetensors"),
        (adapter, "is an adapter of some/base, not a model"),
        (write_llama, "has no tokenizer, so each job with a text would fail"),
    ],
)
def test_it_ends_before_a_job_is_taken(
    write: Callable[[Path], object], message: str, client: QueueClient, tmp_path: Path
) -> None:
    (model := tmp_path / "model").mkdir()
    write(model)
    (job,) = client.submit({"model": "model", "prompt": "Hi", "max_tokens": 1})
    words = (
        "--model",
        str(model),
        "--redis-url",
        client.url,
        "--queue",
        client.queue,
        "--num-kv-blocks",
        "64",
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pagemill", "worker", *words, "--num-threads", "1", "--http-port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert client.status(job).state == "queued"
    assert not (model / "ran").exists()
