"""docs/embeddings.md: its example runs with the real model, its tables match the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemill.engine.pooling.families import FAMILIES
from pagemill.engine.pooling.folder import ENCODER_TYPES
from pagemill.producer.wire.schema.job import MAX_INPUTS
from tests.conftest import ROOT
from tests.engine.pooling.conftest import minilm  # noqa: F401  (a fixture)
from tests.worker.harness import running_worker, worker_config

PAGE = (ROOT / "docs/embeddings.md").read_text()


@pytest.mark.slow
def test_the_example(valkey_url: str, minilm: Path) -> None:  # noqa: F811
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    program = found[1].replace("redis://localhost:6379/0", valkey_url)
    names: dict[str, Any] = {}
    with running_worker(worker_config(valkey_url, "default", model=str(minilm), num_threads=1)):
        exec(compile(program, "docs/embeddings.md", "exec"), names)
    assert names["vectors"].shape == (3, 384)
    likeness = names["likeness"]
    assert np.allclose(np.diag(likeness), 1.0, atol=1e-5)
    assert likeness[0, 1] > likeness[0, 2]


def test_the_table_is_the_registry() -> None:
    rows = PAGE.split("| Family | model_type |\n| --- | --- |\n", 1)[1].split("\n\n", 1)[0].splitlines()
    listed = [kind.strip() for row in rows for kind in row.strip("|").split("|")[1].split(",")]
    assert sorted(listed) == sorted(kind for family in FAMILIES for kind in family.model_types)
    assert {*ENCODER_TYPES} <= {*listed}
    assert f"up to {MAX_INPUTS:,} `inputs`" in PAGE
