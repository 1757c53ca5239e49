"""Greedy tokens and log probabilities of prompts with pictures equal those of transformers' complete model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.models.families.multimodal import MULTIMODAL
from tests.conftest import ROOT
from tests.engine.media.tiny_vision import TYPES, Picture, add, expected, make_engine, picture, run, write

QUICK = ("llava", "qwen2_vl", "qwen3_vl")
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in TYPES]
DOCUMENTED = (ROOT / "docs" / "models.md").read_text().partition("**Images.**")[2].partition("\n\n")[0]
TEXT = [5, 17, 33, 8, 2, 61, 44]
Prompt = list[Picture | list[int]]


def prompts(kind: str) -> dict[str, Prompt]:
    return {
        "one": [TEXT[:3], picture(kind, 0), TEXT],
        "text": [TEXT * 3],
        "two": [TEXT[:1], picture(kind, 1), TEXT[:2], picture(kind, 2), TEXT[:4]],
        "other": [TEXT[:3], picture(kind, 3), TEXT],  # "one", as far as tokens show
        "again": [TEXT[:3], picture(kind, 0), TEXT[:5]],
        "last": [TEXT[:6], picture(kind, 4)],
    }


def check(found: dict[str, tuple[list[int], list[float]]], reference: dict[str, Any]) -> None:
    assert found.keys() == reference.keys()
    for name, (tokens, logprobs) in reference.items():
        assert found[name][0] == tokens, name
        assert found[name][1] == pytest.approx(logprobs, abs=1e-3), name


def test_every_type_that_reads_images_is_tried_and_documented() -> None:
    rows = {kind: row.name for kind, row in MULTIMODAL.items() if row.images}
    assert rows.keys() == TYPES.keys()
    assert [name for name in rows.values() if name not in DOCUMENTED] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_transformers(kind: str, tmp_path: Path) -> None:
    module = write(kind, tmp_path)
    reference = {name: expected(module, parts) for name, parts in prompts(kind).items()}
    assert reference["one"] != reference["other"]
    whole = make_engine(tmp_path)
    for _ in range(2):  # the second time from the prefix cache
        for name, parts in prompts(kind).items():
            add(whole, name, parts)
        check(run(whole), reference)
    stats = whole.stats()
    assert stats.media.encoded == 5
    assert stats.kv.prefix_hit_tokens
    # Chunks start and end inside pictures, sequences are preempted, and the cache has space for one picture only.
    small = make_engine(tmp_path, max_num_batched_tokens=5, num_kv_blocks=14, media_cache_bytes=3000)
    for name, parts in prompts(kind).items():
        add(small, name, parts)
    check(run(small), reference)
    assert small.stats().scheduler.preemptions or kind not in QUICK
    assert small.stats().media.used_bytes <= 3000
