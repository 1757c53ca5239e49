"""The time of a run's start and its use of the KV cache, stored in the journal."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from pagemill.producer.dataset.errors import DiskError
from pagemill.producer.dataset.journal import Journal
from pagemill.producer.dataset.record import Mean, Totals

STORE_INTERVAL_S = 5.0


class Stopwatch:
    """Adds the time of a run and its KV use to the journal's totals: periodically, and even if the block raises."""

    def __init__(self, journal: Journal, kv: Callable[[], tuple[Mean, Mean]]) -> None:
        self._journal = journal
        self._kv = kv
        self._before = Totals.from_fields(json.loads(journal.fact("totals") or Totals().to_json()))
        self._started = self._stored = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(DiskError):  # a full disk is reported elsewhere
            self._store()

    def tick(self) -> None:
        """Store the totals at intervals: a killed run loses only those since the last."""
        if time.monotonic() >= self._stored + STORE_INTERVAL_S:
            self._store()

    def _store(self) -> None:
        self._stored = time.monotonic()
        utilization, waste = self._kv()
        totals = replace(
            self._before,
            seconds=self._before.seconds + self._stored - self._started,
            starts=self._before.starts + 1,
            kv_utilization=self._before.kv_utilization.plus(utilization),
            kv_waste=self._before.kv_waste.plus(waste),
        )
        self._journal.set_facts(totals=totals.to_json())
