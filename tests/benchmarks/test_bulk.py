from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.bulk import OWN_TOKENS, REPEATS, SHARED_TOKENS, build_workload
from tests.benchmarks.dry_run import dry_run

VOCAB_SIZE = 49152


def test_rows_share_a_beginning_and_are_else_as_distinct_as_they_are_called() -> None:
    distinct, repeated = (build_workload(name, VOCAB_SIZE, 200, 0) for name in ("distinct", "repeated"))
    for workload in (distinct, repeated):
        assert len(workload.prompts) == workload.num_output_tokens == 200
        assert len({tuple(prompt[:SHARED_TOKENS]) for prompt in workload.prompts}) == 1
        own = [len(prompt) - SHARED_TOKENS for prompt in workload.prompts]
        assert OWN_TOKENS[0] <= min(own) <= max(own) <= OWN_TOKENS[1]
    assert len({tuple(prompt) for prompt in distinct.prompts}) == 200
    assert set(Counter(tuple(prompt) for prompt in repeated.prompts).values()) == {REPEATS}


@pytest.mark.slow
def test_a_dry_run_labels_every_row(tmp_path: Path) -> None:
    words = "--engines pagemill --rows 12 --rounds 1 --kv-cache-gib 1"
    report, _ = dry_run("benchmarks.bulk", tmp_path / "bulk.json", *words.split())
    assert [item["workload"] for item in report["passes"]] == ["distinct", "repeated"]
    assert all(item["rows_per_second"] > 0 for item in report["passes"])
