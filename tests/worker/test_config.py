from __future__ import annotations

import pytest
from pydantic import ValidationError

from worker.config import WorkerConfig


def test_a_flag_beats_the_environment_and_the_environment_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEMILL_QUEUE", "from-environment")
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PAGEMILL_BLOCK_SIZE", "32")
    monkeypatch.setenv("PAGEMILL_ENABLE_PREFIX_CACHING", "false")
    config = WorkerConfig.load(model="echo", block_size=8, queue=None)
    assert config.queue == "from-environment"
    assert config.engine.max_num_seqs == 7
    assert config.engine.block_size == 8
    assert not config.engine.enable_prefix_caching
    assert config.drain_grace_s == 10.0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({}, "model"),
        ({"model": "echo", "block_size": 0}, "block_size must be at least 1"),
        ({"model": "echo", "lease_s": 0}, "lease_s"),
        ({"model": "echo", "http_port": 70000}, "http_port"),
        ({"model": "echo", "no_such_option": 1}, "no_such_option"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flags: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        WorkerConfig.load(**flags)
