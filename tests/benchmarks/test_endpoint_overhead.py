from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.dry_run import dry_run


@pytest.mark.slow
def test_both_sides_are_measured_and_have_the_same_tokens(tmp_path: Path) -> None:
    words = "--concurrency 2 --requests 4 --tokens 8 --rate 20 --rounds 1"
    measured, _ = dry_run("benchmarks.endpoint_overhead", tmp_path / "report.json", *words.split())
    assert 0 < measured["tokens_per_second"]["direct"][0] <= 2 * 20
    assert 0 < measured["share_of_direct"] < 1.1
    assert measured["first_token_p50_s"]["direct"][0] >= 1 / 20
