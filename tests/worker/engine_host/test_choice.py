"""The default location of an engine, and the modules that its worker then loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.worker.config import WorkerConfig
from pagemill.worker.engine_host import choice
from tests.conftest import ROOT, run_python

WORKER_HALF = """
import sys
from pagemill.worker.interpreter import stay_without_torch
stay_without_torch()
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.tokenizer import load_tokenizer
import pagemill.worker.worker
tokenizer = load_tokenizer(packaged_model_directory())
assert tokenizer.decode(tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi"}], (), {})))
print(sorted(name for name, module in sys.modules.items() if module and name in ("torch", "numba", "triton")))
"""


@pytest.mark.parametrize(
    ("settings", "has_card", "hidden", "is_own"),
    [
        ({"model": "smollm2"}, True, None, True),
        ({"model": "smollm2"}, True, "", False),
        ({"model": "smollm2"}, True, "-1", False),
        ({"model": "smollm2"}, False, None, False),
        ({"model": "smollm2", "device": "cpu"}, True, None, False),
        ({"model": "smollm2", "device": "cuda"}, False, None, True),
        ({"model": "echo"}, True, None, False),
        ({"model": "echo", "engine_process": "on"}, False, None, True),
        ({"model": "smollm2", "engine_process": "off"}, True, None, False),
    ],
)
def test_an_engine_on_a_card_has_a_process_of_its_own(
    settings: dict[str, str],
    has_card: bool,
    hidden: str | None,
    is_own: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (card := tmp_path / "card").touch()
    monkeypatch.setattr(choice, "_DEVICE_FILES", (str(card) if has_card else str(tmp_path / "none"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choice.runs_in_process(WorkerConfig.load(**settings)) is is_own


@pytest.mark.slow
def test_its_worker_reads_the_tokenizer_without_torch() -> None:
    ended = run_python("-c", WORKER_HALF, cwd=ROOT, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
    assert "PyTorch" not in ended.stderr
