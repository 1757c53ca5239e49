"""A job's history: when it was submitted, which workers ran it, and how each execution ended.

A job's record holds its current or last execution; those that did not end it are kept in a separate short
list (`history:<id>`), so that a job with one execution costs nothing extra.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from pagemill.producer.wire.calls.reads import unpack_progress
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import END_STATES, ErrorInfo, Progress, State, WireModel
from pagemill.producer.wire.schema.webhook_url import WebhookUrl
from pagemill.producer.wire.server.scripts import Call, as_map

ExecutionEnd = Literal[
    "running", "retried", "released", "lost", "crashed", "succeeded", "failed", "cancelled", "expired", "dead"
]
"""released: requeued unfinished. lost: its lease lapsed. crashed: the same, without progress."""


class Execution(WireModel):
    """One worker's execution of the job."""

    worker: str | None
    attempt: int
    started_at: float | None
    ended_at: float | None
    """None while it is running."""
    outcome: ExecutionEnd
    code: str = ""
    message: str = ""
    queued_at: float | None = None
    """When it returned to its lane before this execution, if it did not stay there since its submission."""
    saved_at: float | None = None
    """The last checkpoint, or report of progress."""
    spent: str = ""
    """The breakdown of its time, as its worker reported it (account.py)."""


class WebhookHistory(WireModel):
    """The deliveries of a job's webhook."""

    host: str
    """The receiver's host. The URL itself can contain a secret."""
    tries: int
    outcome: str
    """Of the last try: delivered, failed, refused or given up, with the reason. Empty before it."""
    next_at: float | None
    """When the next try is due, or a try in progress is repeated. None: there is none, or the job has not ended."""


class JobHistory(WireModel):
    """A job's history since its submission. Times are unix seconds by the server's clock."""

    id: str
    queue: str
    state: State
    model: str
    tenant: str
    priority: str
    batch: str | None
    key: str | None
    leader: str | None
    """The equal job whose end this one shares; it does not run itself."""
    replay_of: str | None
    """The dead job that this one replays."""
    replayed_as: str | None
    """The job that last replayed this dead one."""
    after: tuple[str, ...]
    """The jobs that it was submitted to wait for."""
    waits_for: tuple[str, ...]
    """Those of them that have not ended yet."""
    created_at: float
    finished_at: float | None
    deadline: float | None
    due_at: float | None
    """Earliest start of a delayed job or a retry."""
    attempts_failed: int
    crashes: int
    stop_asked: str | None
    """cancelled or expired, until its worker has stopped it."""
    live_workers: int
    """Number of workers that serve its model now."""
    unmet: tuple[str, ...] = ()
    """The words that a worker must know to run it, if none of those workers knows all of them."""
    progress: Progress
    executions: tuple[Execution, ...]
    """Oldest first; only the last ones if there are very many."""
    error: ErrorInfo | None
    queued_at: float | None = None
    """When it last returned to its lane."""
    webhook: WebhookHistory | None = None


def history(queue: str, job_id: str) -> Call[JobHistory | None]:
    """Return a job's history; None if it is unknown. Contains no prompt and no output."""
    return Call("history", (keys.prefix(queue),), (job_id,), lambda reply: read_history(queue, job_id, reply))


def read_history(queue: str, job_id: str, reply: list[Any]) -> JobHistory | None:
    """Return a job's history from the script's reply."""
    if not reply:
        return None
    found = as_map(reply)
    record = {name: value.decode() for name, value in as_map(found["record"]).items()}
    _, priority, tenant, model = keys.split_lane(record["lane"])
    error = ErrorInfo.model_validate_json(found["error"]) if found["error"] else None
    past = [_past(json.loads(entry.decode("utf-8", "replace"))) for entry in found["executions"]]
    return JobHistory(
        id=job_id,
        queue=queue,
        state=record["state"],
        model=model,
        tenant=tenant,
        priority=priority,
        batch=record.get("batch"),
        key=record.get("key"),
        leader=record.get("leader"),
        replay_of=record.get("replay_of"),
        replayed_as=record.get("replayed_as"),
        after=tuple(record.get("after", "").split()),
        waits_for=tuple(record.get("waits", "").split()),
        created_at=int(record["at"]) / 1000,
        finished_at=_seconds(record.get("finished_at")),
        deadline=_seconds(record.get("deadline")),
        due_at=_seconds(record.get("due_at")),
        attempts_failed=int(record.get("failures", 0)),
        crashes=int(record.get("crashes", 0)),
        stop_asked=record.get("ending"),
        live_workers=found["live_workers"],
        unmet=keys.needed_words(record["lane"]) if found["is_unmet"] and found["live_workers"] else (),
        progress=unpack_progress(record.get("progress"), record.get("progress_at")),
        executions=(*past, *_last(record, past, error)),
        error=error.model_copy(update={"partial": ()}) if error is not None else None,
        queued_at=_seconds(record.get("queued_at")),
        webhook=_webhook(record, _seconds((found.get("notice_at") or b"").decode())),
    )


def _webhook(record: dict[str, str], next_at: float | None) -> WebhookHistory | None:
    if "webhook" not in record:
        return None
    try:
        host = WebhookUrl.parse(record["webhook"]).host
    except ValueError:
        host = ""
    return WebhookHistory(
        host=host, tries=int(record.get("notified", 0)), outcome=record.get("notice", ""), next_at=next_at
    )


def _past(entry: dict[str, Any]) -> Execution:
    known = get_args(ExecutionEnd)
    return Execution(
        worker=entry.get("worker"),
        attempt=int(entry.get("attempt") or 0),
        started_at=_seconds(entry.get("started_at")),
        ended_at=_seconds(entry.get("at")),
        outcome=entry["kind"] if entry.get("kind") in known else "lost",
        code=entry.get("code") or "",
        message=entry.get("message") or "",
        queued_at=_seconds(entry.get("queued_at")),
        saved_at=_seconds(entry.get("saved_at")),
        spent=entry.get("spent") or "",
    )


def _last(record: dict[str, str], past: list[Execution], error: ErrorInfo | None) -> list[Execution]:
    """Return the execution in the record itself, unless the list already contains it."""
    started_at = _seconds(record.get("started_at"))
    state = record["state"]
    is_over = state in END_STATES
    if started_at is None or not (is_over or state == "running"):
        return []
    if past and past[-1].started_at == started_at and past[-1].worker == record.get("worker"):
        return []
    return [
        Execution(
            worker=record.get("worker"),
            attempt=int(record.get("attempt", 0)),
            started_at=started_at,
            ended_at=_seconds(record.get("finished_at")),
            outcome=state,  # type: ignore[arg-type]  # a state that an execution can end in, or running
            code=error.code if error is not None and is_over else "",
            message=error.message if error is not None and is_over else "",
            queued_at=_seconds(record.get("queued_at")),
            saved_at=_seconds(record.get("progress_at")),
            spent=record.get("spent", ""),
        )
    ]


def _seconds(milliseconds: str | None) -> float | None:
    return int(milliseconds) / 1000 if milliseconds else None
