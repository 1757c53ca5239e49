"""The Celery message in a native job's metadata, and the job's end as the task's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.exceptions import TaskRevokedError
from kombu.utils.json import dumps, loads

from pagemill.producer.celery.task import OUTCOME, limit_error, plain_error, plain_result
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.schema.errors import TIMED_OUT, JobCancelled, JobError, JobExpired, StoreError
from pagemill.producer.wire.store.store import URL_VARIABLE, Store

METADATA = "celery"
"""The field of the job's metadata."""


def with_result(outcome: Outcome) -> Outcome:
    """Return an outcome with its result, from the store of PAGEMILL_STORE_URL if necessary. Raises StoreError."""
    if outcome.stored is None:
        return outcome
    store = Store.from_environment()
    if store is None:
        raise StoreError(f"the result is in a store, but no store is configured: set {URL_VARIABLE}", "unset")
    return outcome.loaded(store.read(outcome.stored.reference))


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """The part of an unsent message that the relay needs: `embed` has the links, the chain and the chord."""

    headers: dict[str, Any]
    embed: dict[str, Any]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> TaskMessage | None:
        """Return the message in a job's metadata; None if there is none."""
        text = (metadata or {}).get(METADATA)
        if not isinstance(text, str):
            return None
        stored = loads(text)
        return cls(stored["headers"], stored["embed"])

    def to_metadata(self) -> str:
        return str(dumps({"headers": self.headers, "embed": self.embed}))

    @property
    def wants_result(self) -> bool:
        return not self.headers.get("ignore_result")

    def request(self, task_id: str, end: dict[str, Any] | BaseException | None = None) -> dict[str, Any]:
        """Return the request of a task with this end, in the form of Celery's tracer."""
        return {
            **self.headers,
            **self.embed,
            OUTCOME: end,
            "args": (),
            "kwargs": {},
            "is_eager": False,
            "delivery_info": {},
            "hostname": "pagemill-relay",
            "correlation_id": task_id,
        }

    def end(self, outcome: Outcome) -> dict[str, Any] | BaseException:
        """Return the value of the task, or the exception that it ends with."""
        limits = self.headers.get("timelimit") or (None, None)
        revoked: BaseException
        try:
            result = outcome.value()
        except JobCancelled:
            revoked = TaskRevokedError("revoked")
            return revoked
        except JobError as error:
            is_expired, is_timed_out = isinstance(error, JobExpired), str(error).startswith(TIMED_OUT)
            if is_expired and not is_timed_out and self.headers.get("expires"):
                revoked = TaskRevokedError("expired")
                return revoked
            return limit_error(limits) if is_expired and is_timed_out and any(limits) else plain_error(error)
        assert result is not None, "only of jobs that have ended"
        return plain_result(result)
