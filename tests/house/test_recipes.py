"""CONTRIBUTING.md, "Files to change": every file of a recipe exists, and no recipe exceeds its number of files."""

from __future__ import annotations

import re

from tests.conftest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = re.findall(
    r"^\| ([a-z].*?) \| (\d+) \| (.*) \|$", PAGE.partition("## Files to change")[2], re.MULTILINE
)
PROMISED = {
    "number or flag for sampling": 3, "list of tokens or texts for sampling": 4,
    "family of models that is like LLaMA": 1, "type of transformers that a packed batch breaks": 1,
    "metric of the KV cache": 3, "panel": 1, "quota": 4, "setting of a worker": 2, "endpoint": 3,
    "feature of the queue": 4, "quantization scheme": 3, "format of quantized checkpoints": 2,
    "kind of job": 6, "device": 2, "attention library": 3,
}  # fmt: skip


def test_a_recipe_keeps_its_promise() -> None:
    assert {what: int(most) for what, most, _ in ROWS} == PROMISED
    for what, most, files in ROWS:
        named = set(re.findall(r"`([\w/]+(?:\.(?:py|lua)|/))`", files))
        assert [name for name in named if not (ROOT / name).exists()] == [], what
        assert 0 < len(named) <= int(most), what
