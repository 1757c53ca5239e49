"""Celery as a producer: a task whose `.delay()` submits straight to the native queue, with its guarantees.

    from pagemill.producer.celery import generation_task

    app = Celery("shop", broker=..., backend=...)
    generate = generation_task(app, model="smollm2")
    generate.delay(prompt="The capital of France is", max_tokens=20).get()

No Celery worker holds the job while it waits and runs. The script that ends the job also writes an entry into
an outbox; a relay (`pagemill celery-relay --celery-app shop:app`) hands it to Celery's own tracer, at least
once. So results, links, chains, groups and chords are Celery's, and a generation is committed exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery, Task, current_task
from celery.result import AsyncResult
from celery.utils import uuid
from celery.utils.time import maybe_make_aware
from kombu.utils.functional import maybe_list
from kombu.utils.json import dumps, loads

from pagemill.producer.celery.task import TASK_NAME, desk, job_fields
from pagemill.producer.client import submit_flow
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema.errors import InvalidJob

RELAY = "celery"
METADATA = "celery"


class GenerationTask(Task):  # type: ignore[misc]
    """The class of the task that `generation_task` returns. Jobs have the task's id."""

    abstract = True
    producer: Producer
    model: str | None = None

    def run(self, prompt: Any = None, /, **fields: Any) -> dict[str, Any]:
        """Return the outcome. Called only by the relay's tracer, after the job has ended."""
        return desk.take(self.request.id)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Submit the job; Celery's time options (countdown, eta, expires, time_limit) become the job's.

        Raises InvalidJob, QueueFull, RedisUnavailable: at once in the caller, not later in a worker.
        """
        chosen = task_id or uuid()
        message = self._message(chosen, args, kwargs, link, link_error, shadow, options)
        fields = job_fields(args or (), kwargs or {}, self.model) | self._times(options)
        if METADATA in (fields.get("metadata") or {}):
            raise InvalidJob(f"metadata may not hold {METADATA!r} here")
        _, _, embed = message.body
        told = dumps({"headers": message.headers, "embed": embed})
        fields["metadata"] = {**(fields.get("metadata") or {}), METADATA: told}
        native = self.producer
        item = native.preparer.job(None, fields, chosen, relay=RELAY)
        native.run_flow(submit_flow.submit(native.queue, item, "raise"))
        result = self.AsyncResult(chosen)
        if current_task and current_task.request.called_directly is False:
            current_task.add_trail(result)
        return result

    def _message(
        self,
        task_id: str,
        args: Any,
        kwargs: Any,
        link: Any,
        link_error: Any,
        shadow: str | None,
        options: dict[str, Any],
    ) -> Any:
        """Return the message that Celery would have sent; it holds the links, the chain and the chord."""
        parent = current_task.request if current_task else None
        known = {name: options[name] for name in _MESSAGE_OPTIONS if options.get(name) is not None}
        known.setdefault("root_id", (parent.root_id or parent.id) if parent else task_id)
        known.setdefault("parent_id", parent.id if parent else None)
        return self.app.amqp.as_task_v2(
            task_id,
            self.name,
            args,
            kwargs,
            callbacks=maybe_list(link),
            errbacks=maybe_list(link_error),
            shadow=shadow,
            ignore_result=options.get("ignore_result", self.ignore_result),
            **known,
        )

    def _times(self, options: dict[str, Any]) -> dict[str, Any]:
        times: dict[str, Any] = {}
        if options.get("countdown"):
            times["delay"] = float(options["countdown"])
        if options.get("eta") is not None:
            times["run_at"] = maybe_make_aware(options["eta"], tz=self.app.timezone).timestamp()
        if (expires := options.get("expires")) is not None:
            if isinstance(expires, int | float):
                times["ttl"] = float(expires)
            else:
                times["deadline"] = maybe_make_aware(expires, tz=self.app.timezone).timestamp()
        if limit := options.get("time_limit") or self.time_limit:
            times["timeout"] = float(limit)
        return times


_MESSAGE_OPTIONS = (
    "group_id", "group_index", "chord", "chain", "root_id", "parent_id", "reply_to", "stamped_headers",
)  # fmt: skip


def generation_task(app: Celery, *, model: str | None = None, url: str | None = None, queue: str = "default",
                    name: str = TASK_NAME) -> GenerationTask:  # fmt: skip
    """Register the task in an app and return it. `url` and `queue` are as in Producer."""
    task: GenerationTask = app.register_task(
        type(
            "generate",
            (GenerationTask,),
            {"name": name, "abstract": False, "model": model, "producer": Producer(url, queue=queue)},
        )()
    )
    return task


def told_message(metadata: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the headers and the links that a job's metadata holds for the relay; None if it holds none."""
    text = (metadata or {}).get(METADATA)
    if not isinstance(text, str):
        return None
    told = loads(text)
    return told["headers"], told["embed"]
