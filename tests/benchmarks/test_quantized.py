"""The benchmark of quantised checkpoints, over a toy model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engines import quantized
from tests.engine.tiny_model import save_tiny_llama


@pytest.mark.slow
def test_every_variant_is_measured_beside_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=256)
    monkeypatch.setattr(quantized, "PROMPT", 4)
    monkeypatch.setattr(quantized, "VOCAB", 50)
    command = ["quantized", "--model", str(tmp_path / "model"), "--rounds", "2", "--rows", "1", "2", "--tokens", "4",
               "--out", str(tmp_path / "out.json")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    assert quantized.main() == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["weight_bytes"].keys() == quantized.VARIANTS.keys()
    sizes = report["weight_bytes"]
    assert sizes["w4a16"] < sizes["fp8"] < sizes["bf16"] < sizes["fp32"]
    for rows in ("1", "2"):
        assert report["speed_beside_fp32"][rows]["fp32"] == [1.0, 1.0]
        assert all(len(found) == 2 for found in report["step_seconds_and_processor_seconds"][rows].values())
