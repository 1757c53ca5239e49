"""Results that wait for a slow store have a bound."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from pagemill.worker.jobs.running_job import Outcome
from pagemill.worker.jobs.store import results
from pagemill.worker.jobs.store.results import StoredResults
from tests.worker.harness import eventually


class SlowStore:
    """A store that does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def takes(self, size: int) -> bool:
        return True

    def new_uri(self, *names: str) -> str:
        self.answers.wait(60)
        raise RuntimeError("no file is written in this test")


def ended(size: int, outcome: Outcome = Outcome.SUCCEEDED) -> Any:
    return SimpleNamespace(outcome=outcome, body=b"x" * size, job=object(), job_id="j")


def test_results_beyond_the_bound_do_not_wait_for_the_store() -> None:
    store: Any = SlowStore()
    written: list[Any] = []
    stored = StoredResults(store, lambda: SimpleNamespace(queue="q"))  # type: ignore[arg-type, return-value]
    stored.start(written.append)
    large = ended(results.MAX_WAITING_BYTES // 8)
    assert not stored.takes(ended(1, Outcome.FAILED))
    taken = 0
    while stored.takes(large):
        stored.write(large)
        taken += 1
    assert taken == 8
    store.answers.set()
    eventually(lambda: len(written) == taken, "the store's answers")
    assert eventually(lambda: stored.takes(large), "room for more")
    stored.stop()
