"""docs/adapters.md: its examples run with the real model, its table matches the settings."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dense import dense_smollm2
from pagemill.engine.config import EngineConfig
from tests.conftest import ROOT
from tests.engine.adapters.trained import Trained, save_adapter
from tests.worker.harness import running_worker, worker_config

PAGE = (ROOT / "docs/adapters.md").read_text()


@pytest.mark.slow
def test_the_examples(valkey_url: str, tmp_path: Path) -> None:
    folder = save_adapter(dense_smollm2(), tmp_path / "french", Trained(std=0.3))
    queued, direct = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    config = worker_config(
        valkey_url, "default", model="smollm2", num_kv_blocks=64, adapters=(f"french={folder}",)
    )
    names: dict[str, Any] = {}
    with running_worker(config, load_patience_s=400):
        program = queued.replace("redis://localhost:6379/0", valkey_url)
        exec(compile(program, "docs/adapters.md", "exec"), names)
    assert names["plain"].result().text != names["french"].result().text
    exec(compile(direct.replace("./french-lora", str(folder)), "docs/adapters.md", "exec"), names)
    french, plain = names["outputs"]
    assert french.error is plain.error is None
    assert french.outputs[0].token_ids != plain.outputs[0].token_ids


def test_the_table_is_the_settings() -> None:
    rows = re.findall(r"^\| `(\w+)`.*? \| (.*?) \|", PAGE.partition("## Memory")[2], re.MULTILINE)
    listed = [name for name, _ in rows]
    assert listed == [field.name for field in fields(EngineConfig) if "adapter" in field.name]
    defaults = {field.name: str(field.default) for field in fields(EngineConfig)}
    assert all(default == defaults[name] for name, default in rows if default.isdigit())
