"""The Celery task `pagemill.generate`: its arguments, results and errors.

The body of the task does not generate. When Celery's tracer runs it, the outcome is already stored under the
task's id; the tracer then does everything Celery promises: result backend, links, chains, chords, events,
signals. Results and errors are plain types, so that callers need none of our code.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from celery import Celery, Task

from pagemill.error_codes import FINAL_CODES
from pagemill.producer.wire.schema.errors import InvalidJob, JobError
from pagemill.producer.wire.schema.outputs import Result

TASK_NAME = "pagemill.generate"
NO_RESULT = 0
"""`resultrepr_maxsize`: Celery writes that much of a result to logs and events, and generated text is in neither."""
_PLAIN_ERRORS: dict[str, type[Exception]] = {"invalid": ValueError, "other": RuntimeError}


class OutcomeDesk:
    """Outcomes waiting for the tracer, by task id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[str, dict[str, Any] | BaseException] = {}

    def leave(self, task_id: str, outcome: dict[str, Any] | BaseException) -> None:
        with self._lock:
            self._outcomes[task_id] = outcome

    def take(self, task_id: str) -> dict[str, Any]:
        """Return the outcome; raises it if it is an error."""
        with self._lock:
            outcome = self._outcomes.pop(task_id, None)
        if outcome is None:
            raise RuntimeError(
                f"{TASK_NAME} was started by a worker that does not generate; "
                "run a worker with: pagemill celery-worker"
            )
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


desk = OutcomeDesk()


def register(app: Celery) -> Task[..., Any]:
    """Register the task in the app and return it. Idempotent."""
    if TASK_NAME in app.tasks:
        found: Task[..., Any] = app.tasks[TASK_NAME]
        return found

    @app.task(  # type: ignore[untyped-decorator]
        name=TASK_NAME,
        bind=True,
        acks_late=True,
        reject_on_worker_lost=True,
        resultrepr_maxsize=NO_RESULT,
    )
    def generate(self: Any, prompt: Any = None, /, **fields: Any) -> dict[str, Any]:
        """Takes a Job's fields; one positional argument: the prompt, the messages or an earlier result."""
        return desk.take(self.request.id)

    task: Task[..., Any] = generate
    return task


def job_fields(args: Any, kwargs: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Return the fields of the job that a task's arguments ask for. Raises InvalidJob.

    A chain passes the previous task's result as the positional argument.
    """
    if len(args) > 1:
        raise InvalidJob(f"{TASK_NAME} takes at most one argument before its keywords")
    fields = dict(kwargs)
    if args:
        fields = _prompt(args[0]) | fields
    if model is not None:
        fields.setdefault("model", model)
    return fields


def plain_result(result: Result) -> dict[str, Any]:
    """Return a Result as plain JSON values, with the first text in front, or the label and all probabilities."""
    labels = {} if result.label is None else {"label": result.label, "label_probs": result.label_probs}
    return {"text": result.text, **labels, **result.model_dump(mode="json")}


def plain_error(error: Exception) -> Exception:
    """Return an error that unpickles without our code: ValueError for an invalid job, else RuntimeError."""
    code = error.code if isinstance(error, JobError | InvalidJob) else type(error).__name__
    kind = "invalid" if isinstance(error, InvalidJob) or code in FINAL_CODES else "other"
    return _PLAIN_ERRORS[kind](f"{code}: {error}")


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
