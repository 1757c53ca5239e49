"""The models of a batch's requests: those that the queue knows, and the treatment of requests for others.

Requests are submitted only for models that the queue knows. The others wait for their model. Once a worker has been
ready for a grace period, the models that are still unknown fail their requests. Both decisions are saved in the batch's
record before they take effect, so that a gateway that takes over the batch makes the same ones.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

from pagemill.producer.gateway.served_models import ServedModels
from pagemill.producer.openai.lines import BatchRequest
from pagemill.producer.wire.schema.job import Job

MAX_REPORTED = 20
"""Maximum number of models that the batch object names."""


class LineModels:
    """The models of one batch."""

    def __init__(self, served: ServedModels, record: dict[str, str], grace_s: float) -> None:
        self.accepted: set[str] = set(json.loads(record.get("accepted") or "[]"))
        """Models whose requests are or become jobs of the queue."""
        self.is_final = record.get("is_final") == "1"
        """True if no further model is accepted: requests for other models fail."""
        self._served = served
        self._grace_s = grace_s
        self._ready_since: float | None = None
        self._lines: dict[str, int] = {}
        """Each model's first line."""

    def record(self) -> dict[str, Any]:
        """Return the decisions as values of the batch's record."""
        return {"accepted": json.dumps(sorted(self.accepted)), "is_final": int(self.is_final)}

    @property
    def undecided(self) -> set[str]:
        """The models with requests that wait for submission."""
        return set() if self.is_final else self._lines.keys() - self.accepted

    async def read(self, requests: Iterable[BatchRequest]) -> None:
        """Accept the models that these requests name for the first time, if the queue knows them."""
        new: set[str] = set()
        for request in requests:
            if isinstance(request.job, Job) and request.job.model not in self._lines:
                self._lines[request.job.model] = request.number
                new.add(request.job.model)
        await self._accept(new)

    async def refresh(self) -> set[str]:
        """Return the accepted models; after the grace period, the rest is final."""
        await self._served.refresh()
        # Read before the lookup of models, so that the models of all ready workers are found.
        is_ready = self._served.has_ready_worker
        undecided = self.undecided
        found = await self._accept(undecided)
        if not is_ready:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = time.monotonic()
        if self._ready_since is not None and undecided:
            self.is_final = time.monotonic() >= self._ready_since + self._grace_s
        return found

    async def _accept(self, names: set[str]) -> set[str]:
        """Accept those of these models that the queue knows. Returns the new ones."""
        undecided = set() if self.is_final else names - self.accepted
        found = set(await self._served.known(undecided)) if undecided else set()
        self.accepted |= found
        return found

    def waiting(self) -> str:
        """Return the models without a live worker, as JSON for the batch's `errors`; '' if there is none."""
        names = (
            name
            for name in self._lines
            if not self._served.is_served(name) and (name in self.accepted or not self.is_final)
        )
        rows = [
            {
                "code": "model_not_ready",
                "message": f"no live worker serves the model {name!a}; its unfinished requests wait",
                "line": self._lines[name],
                "param": "model",
            }
            for name in itertools.islice(names, MAX_REPORTED)
        ]
        return json.dumps({"object": "list", "data": rows}) if rows else ""
