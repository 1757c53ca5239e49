"""docs/architecture.md, "How to add": no recipe grows beyond the number of files that it promises."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| ([a-z].*?) \| (\d+) \| (.*) \|$", PAGE.partition("## How to add")[2], re.MULTILINE)
PROMISED = {
    "number or flag for sampling": 3,
    "list of tokens or texts for sampling": 4,
    "family of models that is like LLaMA": 1,
    "figure of the KV cache": 3,
    "quantisation scheme": 3,
    "format of quantised checkpoints": 2,
    "kind of job": 6,
    "device": 2,
}


@pytest.mark.parametrize(("what", "most", "files"), ROWS, ids=[row[0] for row in ROWS])
def test_a_recipe_keeps_its_promise(what: str, most: str, files: str) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", files))
    assert all((ROOT / name).is_file() for name in named)
    assert 0 < len(named) <= int(most) == PROMISED[what]


def test_every_promise_has_its_recipe() -> None:
    assert [what for what, _, _ in ROWS] == list(PROMISED)
