"""A job that kills its workers, next to many that do not."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import reads, transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from tests.producer.driving import Queue, delta

INNOCENTS = 64


class Fleet:
    """Workers that crash as soon as they run the poison job; the jobs they held get no more updates."""

    def __init__(self, queue: Queue, *, advances: bool) -> None:
        self.queue = queue
        self.advances = advances
        self.deaths = 0
        self.ran_beside_poison: set[str] = set()
        self.runs: dict[str, int] = {}

    def work(self) -> bool:
        """One worker pulls and runs until it is done or crashed; False if there were no jobs to pull."""
        worker = f"w{self.deaths}"
        jobs = self.queue.pull(INNOCENTS + 1, worker=worker)
        for job in jobs:
            self.runs[job.job_id] = self.runs.get(job.job_id, 0) + 1
            assert not job.alone or len(jobs) == 1, "a suspect runs alone"
            self.queue.checkpoint(job)
        if self.advances:
            for job in jobs:
                if job.job_id != "poison":
                    self._advance(job)
        if any(job.job_id == "poison" for job in jobs):
            self.deaths += 1
            self.ran_beside_poison |= {job.job_id for job in jobs}
            for job in jobs:
                self.queue.lapse(job.job_id)
        else:
            for job in jobs:
                assert self.queue.commit(job) == "committed"
        return bool(jobs)

    def _advance(self, job: PulledJob) -> None:
        known = sum(len(sample.token_ids) for sample in job.checkpoint.seqs) if job.checkpoint else 0
        assert self.queue.checkpoint(job, delta(known, 7)) == "ok"


@pytest.mark.parametrize("advances", [True, False])
def test_a_poison_job_costs_the_innocents_nothing(queue: Queue, advances: bool) -> None:
    names = [f"i{i}" for i in range(INNOCENTS)]
    queue.submit(*names[:32])
    queue.submit("poison")
    queue.submit(*names[32:])
    fleet = Fleet(queue, advances=advances)
    while fleet.work():
        assert fleet.deaths <= 5
    assert fleet.deaths == 5
    outcome = queue.run(reads.outcome(queue.name, "poison"))
    assert outcome.error is not None
    assert (outcome.state, outcome.error.code) == ("dead", "crash_suspect")
    assert {queue.state(name) for name in names} == {"succeeded"}
    assert all(queue.status(name).attempt == 1 for name in names), "a crash is no attempt"
    # Up to three crashes with other jobs present; from then on the poison job was alone.
    assert max(fleet.runs[name] for name in names) <= 4
    assert not any(name.startswith(("suspects", "leases", "wait:")) for name in queue.names())


def test_each_worker_runs_one_suspect(queue: Queue) -> None:
    queue.submit("a", "b", "c")
    for _ in range(3):
        for job in queue.pull(3):
            queue.checkpoint(job)
            queue.lapse(job.job_id)
        queue.run(transitions.sweep(queue.name))
    assert [queue.status(name).crashes for name in "abc"] == [3, 3, 3]
    first, second = queue.pull_one(worker="w1"), queue.pull_one(worker="w2")
    assert first.alone
    assert second.alone
    assert first.job_id != second.job_id
    assert queue.pull(worker="w1", holding=1) == queue.pull(worker="w2", holding=1) == []
    assert queue.commit(first) == "committed"
    assert queue.pull_one(worker="w1").alone


def test_a_hand_back_is_no_crash_and_a_suspect_keeps_its_count(queue: Queue) -> None:
    queue.submit("a")
    for _ in range(4):
        queue.checkpoint(queue.pull_one())
        queue.lapse("a")
        queue.run(transitions.sweep(queue.name))
    job = queue.pull_one()
    queue.checkpoint(job)
    assert queue.release(job) == "released"
    assert queue.status("a").crashes == 4
    assert queue.pull_one().alone
