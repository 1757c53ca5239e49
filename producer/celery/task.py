"""The Celery task `pagemill.generate`: its arguments, its body, its results and errors.

Results and errors are plain types, so that callers do not need Pagemill installed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.exceptions import Ignore, SoftTimeLimitExceeded, TimeLimitExceeded
from celery.utils import uuid

from pagemill.common.error_codes import FINAL_CODES
from pagemill.producer.client import flows
from pagemill.producer.client.effects import Flow, Wait
from pagemill.producer.client.handles import JobHandle
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema.errors import (
    InvalidJob,
    JobError,
    PagemillError,
    QueueFull,
    RedisUnavailable,
)
from pagemill.producer.wire.schema.keys import ID_PATTERN
from pagemill.producer.wire.schema.outputs import JobStatus, Progress, Result

logger = logging.getLogger(__name__)

TASK_NAME = "pagemill.generate"
NO_RESULT = 0
"""`resultrepr_maxsize`: the maximum characters of a result that Celery writes to logs and events, which must not
contain generated text."""
PROGRESS = "PROGRESS"
PROGRESS_S = 1.0
RETRY_S = 0.5
CHECK = "pagemill_check"
"""The field of a request with a function that raises once the task must stop; Celery's worker sets it."""
OUTCOME = "pagemill_outcome"
"""The field of a request with the outcome of a job that has already ended; the relay sets it."""
Limits = tuple[float | None, float | None]
"""The hard and the soft time limit in seconds."""


class NativeTask(Task):  # type: ignore[misc]
    """Runs a generation as a job of the native queue: submits it, waits, and returns the result.

    The job's id is the task's, or a hash of one that no job can have, so a message that is delivered twice generates
    once.
    """

    abstract = True
    Request = "pagemill.producer.celery.serving:GenerationRequest"
    acks_late = True
    reject_on_worker_lost = True
    resultrepr_maxsize = NO_RESULT
    producer: Producer
    """The producer of the task's native queue."""
    model: str | None = None

    def run(self, *args: Any, **fields: Any) -> dict[str, Any]:
        """Return the result as a dict.

        Args:
            args: at most one: the prompt, the messages, a dict of a job's fields, or an earlier result.
            fields: a job's fields.
        """
        request = self.request
        outcome = request.get(OUTCOME)
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is not None:
            return dict(outcome)
        job_id = request.id or uuid()  # a call like a function's has no id
        if request.retries:
            job_id = f"{job_id}.{request.retries}"
        if not ID_PATTERN.fullmatch(job_id):
            job_id = hashlib.sha256(job_id.encode(errors="surrogatepass")).hexdigest()
        try:
            return plain_result(self._generate(job_id, job_fields(args, fields, self.model)))
        except PagemillError as error:
            raise plain_error(error) from None

    def limits(self, hard: float | None, soft: float | None) -> Limits:
        """Return the limits of a call, or those of the task or the app if it has none."""
        conf = self.app.conf
        return (
            hard or self.time_limit or conf.task_time_limit,
            soft or self.soft_time_limit or conf.task_soft_time_limit,
        )

    def _generate(self, job_id: str, fields: dict[str, Any]) -> Result:
        """Return the job's result, even if the server is repeatedly unavailable or the queue is full."""
        limits = self.limits(*(self.request.timelimit or (None, None)))
        give_up = time.monotonic() + shortest(limits)
        handle: JobHandle | None = None
        generated_tokens = 0
        while True:
            try:
                self._check_stop(limits, give_up)
            except (Ignore, SoftTimeLimitExceeded, TimeLimitExceeded):
                self._cancel(job_id)
                raise
            try:
                handle = handle or self.producer.submit(fields, job_id=job_id)
                wait_s = max(0.0, min(PROGRESS_S, give_up - time.monotonic()))
                # With an idempotency key, the job may be that of another task.
                status = self.producer.run_flow(_next_status(self.producer.queue, handle.id, wait_s))
                if status.done:
                    return handle.result()
            except (RedisUnavailable, QueueFull):
                handle = None  # after a failover the server may not have the job: submit it again
                time.sleep(RETRY_S)  # the id makes the submission idempotent
                continue
            if status.progress.generated_tokens > generated_tokens:
                generated_tokens = status.progress.generated_tokens
                self._report(status.progress)

    def _cancel(self, job_id: str) -> None:
        try:
            self.producer.run_flow(flows.call(transitions.cancel(self.producer.queue, [job_id])))
        except PagemillError as error:
            logger.warning("job %s was not cancelled: %s", job_id, error)

    def _report(self, progress: Progress) -> None:
        if self.request.ignore_result:
            return
        try:
            self.update_state(state=PROGRESS, meta=progress.model_dump(mode="json"))
        except (SoftTimeLimitExceeded, TimeLimitExceeded):
            raise
        except Exception as error:  # any error of the backend: progress is optional
            logger.warning("no progress for task %s: %s", self.request.id, error)

    def _check_stop(self, limits: Limits, give_up: float) -> None:
        check = self.request.get(CHECK)
        if check is not None:
            check()
        if time.monotonic() >= give_up:
            raise limit_error(limits)


def _next_status(queue: str, job_id: str, timeout: float) -> Flow[JobStatus]:
    """Wait until the job may have ended, and return its status."""
    yield Wait(job_id, timeout, polled=True)
    return (yield from flows.status(queue, job_id))


def job_fields(args: Any, kwargs: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Return the fields of the job that a task's arguments describe. Raises InvalidJob.

    A chain passes the previous task's result as the positional argument.
    """
    if len(args) > 1:
        raise InvalidJob(f"{TASK_NAME} takes at most one argument before its keywords")
    fields = dict(kwargs)
    if args:
        fields = _prompt(args[0]) | fields
    if fields.get("model") is None:
        fields["model"] = model
    return {name: value for name, value in fields.items() if name != "model" or value is not None}


def shortest(limits: Limits) -> float:
    """Return the shorter limit; infinity without limits."""
    return min((float(limit) for limit in limits if limit), default=math.inf)


def limit_error(limits: Limits) -> Exception:
    """Return Celery's error for the shorter limit."""
    hard, soft = limits
    is_soft = soft == shortest(limits)
    error: Exception = SoftTimeLimitExceeded() if is_soft else TimeLimitExceeded(hard)
    return error


def plain_result(result: Result) -> dict[str, Any]:
    """Return a Result as plain JSON values, with the first text at the top, or the label and all probabilities."""
    labels = {} if result.label is None else {"label": result.label, "label_probs": result.label_probs}
    return {"text": result.text, **labels, **result.model_dump(mode="json")}


def plain_error(error: Exception) -> Exception:
    """Return an error that unpickles without Pagemill's code: ValueError for an invalid job, otherwise RuntimeError."""
    code = error.code if isinstance(error, JobError | InvalidJob) else type(error).__name__
    is_invalid = isinstance(error, InvalidJob) or code in FINAL_CODES
    return (ValueError if is_invalid else RuntimeError)(f"{code}: {error}")


def _prompt(given: Any) -> dict[str, Any]:
    match given:
        case str():
            return {"prompt": given}
        case list():
            return {"messages": given}
        case {"outputs": [{"text": str(text)}, *_]}:
            return {"prompt": text}
        case dict():
            return dict(given)
    raise InvalidJob("the argument must be a prompt, messages, a job's fields or an earlier result")
