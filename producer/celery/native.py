"""Celery as a producer: a task whose `.delay()` submits directly to the native queue, with its guarantees.

    from pagemill.producer.celery import generation_task

    app = Celery("shop", broker=..., backend=...)
    generate = generation_task(app, model="smollm2")
    generate.delay(prompt="The capital of France is", max_tokens=20).get()

No Celery worker holds the job while it waits and runs. The script that ends the job also writes an entry into an
outbox; a relay (`pagemill celery-relay --celery-app shop:app`) passes it to Celery's own tracer, at least once. So
results, links, chains, groups and chords are Celery's, and a generation is committed exactly once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from celery import Celery, current_task
from celery.result import AsyncResult
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.functional import maybe_list

from pagemill.producer.celery.task import TASK_NAME, NativeTask, job_fields, shortest
from pagemill.producer.celery.task_message import METADATA, TaskMessage
from pagemill.producer.client import submit_flow
from pagemill.producer.client.preparer import check_id
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema.errors import InvalidJob

RELAY = "celery"


class GenerationTask(NativeTask):
    """The class of the task that `generation_task` returns. Jobs have the task's id."""

    abstract = True
    others: dict[str, Producer]
    """Producers of the queues that `apply_async(queue=...)` has named."""
    url: str | None = None

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
        """Submit the job; Celery's options become the job's. With `task_always_eager`, act like `apply` instead.

        Args:
            args: one prompt, messages, a mapping of fields, or an earlier result.
            kwargs: fields of the job. `priority` takes precedence over the option.
            task_id: the id of the task and of the job.
            producer: has no effect.
            link: task to call after success.
            link_error: task to call after a failure.
            shadow: another name of the task, for events.
            **options: `countdown`, `eta`, `expires`, `time_limit` and `soft_time_limit` are the job's times,
                `priority` its priority, `queue` the native queue.

        Returns:
            Celery's result of the task.

        Raises:
            InvalidJob: the job is invalid.
            QueueFull: the queue accepts no more jobs.
            RedisUnavailable: the server does not respond.
        """
        if self.app.conf.task_always_eager:
            return super().apply_async(args, kwargs, task_id, producer, link, link_error, shadow, **options)
        chosen = check_id(task_id or uuid())
        own = {"link": link, "link_error": link_error, "shadow": shadow}
        message = self._message(chosen, args, kwargs, options | own)
        fields = (
            self._priority(options) | job_fields(args or (), kwargs or {}, self.model) | self._times(options)
        )
        if METADATA in (fields.get("metadata") or {}):
            raise InvalidJob(f"metadata must not contain {METADATA!r} here")
        if fields.get("idempotency_key") is not None:  # the links of this task would be lost with its job
            raise InvalidJob(
                "idempotency_key is not supported here; send the task again with the same task_id",
                param="idempotency_key",
            )
        fields["metadata"] = {**(fields.get("metadata") or {}), METADATA: message.to_metadata()}
        native = self.producer_of(options.get("queue"))
        item = native.preparer.job(None, fields, chosen, relay=RELAY)
        native.run_flow(submit_flow.submit(native.queue, item, "raise"))
        result = self.AsyncResult(chosen)
        if current_task and current_task.request.called_directly is False:
            current_task.add_trail(result)
        return result

    def producer_of(self, queue: Any = None) -> Producer:
        """Return the producer of a native queue.

        Args:
            queue: a name, or kombu's Queue of that name; None: the task's own queue.

        Returns:
            The producer, which the task keeps.
        """
        name = str(getattr(queue, "name", queue) or self.producer.queue)
        if name == self.producer.queue:
            return self.producer
        with _producers_lock:
            if name not in self.others:
                self.others[name] = Producer(self.url, queue=name)
            return self.others[name]

    def _message(self, task_id: str, args: Any, kwargs: Any, options: Mapping[str, Any]) -> TaskMessage:
        """Return the message that Celery would have sent; it contains the links, the chain and the chord."""
        parent = current_task.request if current_task else None
        names = (*_MESSAGE_OPTIONS, *(options.get("stamped_headers") or ()))
        known = {name: options[name] for name in names if options.get(name) is not None}
        known.setdefault("root_id", (parent.root_id or parent.id) if parent else task_id)
        known.setdefault("parent_id", parent.id if parent else None)
        hard, soft = self.limits(options.get("time_limit"), options.get("soft_time_limit"))
        message = self.app.amqp.as_task_v2(
            task_id,
            self.name,
            args,
            kwargs,
            callbacks=maybe_list(options["link"]),
            errbacks=maybe_list(options["link_error"]),
            shadow=options["shadow"],
            ignore_result=options.get("ignore_result", self.ignore_result),
            expires=options.get("expires"),
            time_limit=hard,
            soft_time_limit=soft,
            argsrepr="()",  # the job contains the prompt, and a log may show these
            kwargsrepr="{}",
            **known,
        )
        _, _, embed = message.body
        return TaskMessage(message.headers, embed)

    def _priority(self, options: Mapping[str, Any]) -> dict[str, Any]:
        given = options.get("priority")
        given = self.priority if given is None else given
        if given is None:
            return {}
        if not isinstance(given, int):
            return {"priority": given}
        is_nine_first = self.app.connection_for_write().get_transport_cls().driver_type == "amqp"
        steps = min(9, max(0, 9 - given if is_nine_first else given)) // 3
        return {"priority": ("high", "normal", "low", "low")[steps]}

    def _times(self, options: Mapping[str, Any]) -> dict[str, Any]:
        times: dict[str, Any] = {}
        if (
            countdown := options.get("countdown")
        ) is not None:  # as in Celery, it takes precedence over `eta`
            if countdown > 0:  # the past means now
                times["delay"] = float(countdown)
        elif options.get("eta") is not None:
            times["run_at"] = self._timestamp(options["eta"])
        if (expires := options.get("expires")) is not None:
            if isinstance(expires, int | float) and expires > 0:
                times["ttl"] = float(expires)
            elif isinstance(expires, int | float):
                times["deadline"] = 0.0  # as in Celery, the job is revoked when a worker would start it
            else:
                times["deadline"] = self._timestamp(expires)
        limit = shortest(self.limits(options.get("time_limit"), options.get("soft_time_limit")))
        if limit < math.inf:
            times["timeout"] = limit
        return times

    def _timestamp(self, when: Any) -> float:
        """Return Unix seconds of a datetime or of its ISO form. Raises InvalidJob."""
        try:
            return float(maybe_make_aware(maybe_iso8601(when), tz=self.app.timezone).timestamp())
        except (ValueError, TypeError, AttributeError, OverflowError):
            raise InvalidJob(f"{str(when)[:64]!r} is not a time; use a datetime or its ISO form") from None


_MESSAGE_OPTIONS = (
    "group_id", "group_index", "chord", "chain", "root_id", "parent_id", "reply_to", "stamped_headers",
)  # fmt: skip
_producers_lock = threading.Lock()


def generation_task(app: Celery, *, model: str | None = None, url: str | None = None, queue: str = "default",
                    name: str = TASK_NAME) -> GenerationTask:  # fmt: skip
    """Register a task in an app whose calls become jobs of the native queue.

    Args:
        app: the Celery app.
        model: model of jobs that name none.
        url: the queue's server, as in Producer.
        queue: name of the native queue.
        name: name of the task.

    Returns:
        The task.
    """
    fields = {
        "name": name,
        "abstract": False,
        "model": model,
        "url": url,
        "producer": Producer(url, queue=queue),
        "others": {},
    }
    task: GenerationTask = app.register_task(type("generate", (GenerationTask,), fields)())
    return task
