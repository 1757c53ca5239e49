"""A malicious tenant next to a good one, on a separate worker process: only malicious jobs may suffer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagemill.producer.wire.calls import reads
from tests.adversarial.hostile_jobs import KINDS
from tests.adversarial.neighbourhood import (
    MAX_GROWTH_MB,
    PATIENCE_S,
    Neighbourhood,
    neighbourhood,
    watched,
)  # fmt: skip
from tests.worker.harness import eventually

MODELS = {"echo": {}, "smollm2": {"batch_invariant": True, "num_kv_blocks": 512}}


class Street:
    """The worker and tenants for one model; replaced if the last test has left it damaged."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url, self._directory = url, directory
        self._open = ExitStack()
        self._model, self._is_whole = "", False
        self._one: Neighbourhood | None = None

    def enter(self, model: str) -> Neighbourhood:
        if self._one is None or model != self._model or not self._is_whole:
            self.close()
            settings = MODELS[model]
            self._one = self._open.enter_context(neighbourhood(self._url, model, self._directory, **settings))
        self._model, self._is_whole = model, False
        return self._one

    def leave(self) -> None:
        """The worker is healthy."""
        self._is_whole = True

    def close(self) -> None:
        self._open.close()
        self._one = None


@pytest.fixture(scope="module")
def street(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    street = Street(valkey_url, tmp_path_factory.mktemp("street"))
    yield street
    street.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["echo", pytest.param("smollm2", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_notices(street: Street, model: str, kind: str) -> None:
    one = street.enter(model)
    check_kind(one, kind)
    street.leave()


def check_kind(one: Neighbourhood, kind: str) -> None:
    jobs = list(KINDS[kind]())
    with watched(one.process) as memory:
        ids = one.hostile_jobs(jobs)
        texts, spent_s = one.run_good_jobs()
        give_up = time.monotonic() + PATIENCE_S * (1 if one.model == "echo" else 10)
        while not all(one.client.run(reads.ends(one.client.queue, ids))) and time.monotonic() < give_up:
            time.sleep(0.05)
        wrongs = [one.what_is_wrong(job, job_id) for job, job_id in zip(jobs, ids, strict=True)]
        one.client.cancel(*ids)
    assert one.process.process.poll() is None, "the worker died"
    faults = [
        f"{number}: {str(job.fields or job.raw)[:120]}: {wrong}"
        for number, (job, wrong) in enumerate(zip(jobs, wrongs, strict=True))
        if wrong
    ]
    assert not faults, f"{len(faults)} of {len(jobs)}:\n" + "\n".join(faults)
    assert texts == one.texts, "the good tenant got something else"
    assert spent_s <= one.limit_s(kind), f"{spent_s:.1f} s of processor time instead of {one.alone_s:.1f}"
    assert max(memory) - one.memory_mb < MAX_GROWTH_MB, f"{one.memory_mb} MB, then {max(memory)}"
    eventually(lambda: one.client.stats().leases == 0, "the worker to be free again")
