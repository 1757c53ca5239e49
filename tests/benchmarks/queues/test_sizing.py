"""The benchmark of plans in small: a real model, a real worker, and both sides' figures."""

from __future__ import annotations

import pytest

from benchmarks.queues import sizing


@pytest.mark.slow
def test_a_plan_stands_beside_a_run() -> None:
    measured, speeds, loads = sizing.run("smollm2", jobs=12, prompt_words=20, output_tokens=4)
    assert len(speeds) == len(loads) == 2
    assert {speed.threads for speed in speeds} == {1}
    assert (measured.output_tokens, round(measured.prompt_tokens)) == (4, 20)
    pairs = sizing.compared(measured, sizing.predict("smollm2", measured, speeds, 12))
    assert list(pairs) == [
        "KV blocks",
        "jobs per second of one processor",
        "bytes of a waiting job",
        "bytes of an ended job",
        "scripts per job",
    ]
    assert all(min(pair) > 0 for pair in pairs.values())
    for name in ("bytes of a waiting job", "bytes of an ended job"):  # no clock is read for these
        planned, real = pairs[name]
        assert real == pytest.approx(planned, rel=0.35)
