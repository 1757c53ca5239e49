"""The Celery message that a native job carries in its metadata, and the job's end as that task's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from kombu.utils.json import dumps, loads

from pagemill.producer.celery.task import plain_error, plain_result
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.schema.errors import TIMED_OUT, JobCancelled, JobError, JobExpired, StoreError
from pagemill.producer.wire.store.store import URL_VARIABLE, Store

METADATA = "celery"
"""The field of the job's metadata."""


def whole(outcome: Outcome) -> Outcome:
    """Return an outcome with its result, from the store of PAGEMILL_STORE_URL if it lies there. Raises StoreError."""
    if outcome.stored is None:
        return outcome
    store = Store.from_environment()
    if store is None:
        raise StoreError(
            f"the result lies in a store, and none is configured here: set {URL_VARIABLE}", "unset"
        )
    return outcome.loaded(store.read(outcome.stored.reference))


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """The part of an unsent message that the relay needs: `embed` has the links, the chain and the chord."""

    headers: dict[str, Any]
    embed: dict[str, Any]

    @classmethod
    def of(cls, metadata: Mapping[str, Any] | None) -> TaskMessage | None:
        """Return the message in a job's metadata; None if there is none."""
        text = (metadata or {}).get(METADATA)
        if not isinstance(text, str):
            return None
        told = loads(text)
        return cls(told["headers"], told["embed"])

    def to_metadata(self) -> str:
        return str(dumps({"headers": self.headers, "embed": self.embed}))

    @property
    def wants_result(self) -> bool:
        return not self.headers.get("ignore_result")

    def request(self, task_id: str) -> dict[str, Any]:
        """Return what Celery's tracer takes as the task's request."""
        return {
            **self.headers,
            **self.embed,
            "args": (),
            "kwargs": {},
            "is_eager": False,
            "delivery_info": {},
            "hostname": "pagemill-relay",
            "correlation_id": task_id,
        }

    def end(self, outcome: Outcome) -> dict[str, Any] | BaseException:
        """Return the value of the task, or the exception that it ends with."""
        try:
            result = outcome.value()
        except JobError as error:
            return self._exception(error)
        assert result is not None, "only of jobs that have ended"
        return plain_result(result)

    def _exception(self, error: JobError) -> BaseException:
        end: BaseException = plain_error(error)
        hard, soft = self.headers.get("timelimit") or (None, None)
        if isinstance(error, JobCancelled):
            end = TaskRevokedError("revoked")
        elif isinstance(error, JobExpired) and str(error).startswith(TIMED_OUT) and (hard or soft):
            is_soft = soft and (not hard or soft <= hard)
            end = SoftTimeLimitExceeded() if is_soft else TimeLimitExceeded(hard)
        return end
