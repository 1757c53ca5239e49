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

import threading
from collections.abc import Mapping
from typing import Any

from celery import Celery, Task, current_task
from celery.result import AsyncResult
from celery.utils import uuid
from celery.utils.time import maybe_make_aware
from kombu.utils.functional import maybe_list

from pagemill.producer.celery.task import NO_RESULT, TASK_NAME, desk, job_fields
from pagemill.producer.celery.task_message import METADATA, TaskMessage
from pagemill.producer.client import submit_flow
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema.errors import InvalidJob

RELAY = "celery"


class GenerationTask(Task):  # type: ignore[misc]
    """The class of the task that `generation_task` returns. Jobs have the task's id."""

    abstract = True
    resultrepr_maxsize = NO_RESULT
    producer: Producer
    """Of the task's own queue."""
    others: dict[str, Producer]
    """Of the queues that `apply_async(queue=...)` has named."""
    url: str | None = None
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
        """Submit the job; Celery's options become the job's.

        `countdown`, `eta`, `expires`, `time_limit` and `soft_time_limit` are its times, `priority` its class (a
        `priority` among the keywords wins), `queue` the native queue it goes to.

        Raises InvalidJob, QueueFull, RedisUnavailable: at once in the caller, not later in a worker.
        """
        chosen = task_id or uuid()
        own = {"link": link, "link_error": link_error, "shadow": shadow}
        message = self._message(chosen, args, kwargs, options | own)
        fields = (
            self._priority(options) | job_fields(args or (), kwargs or {}, self.model) | self._times(options)
        )
        if METADATA in (fields.get("metadata") or {}):
            raise InvalidJob(f"metadata may not hold {METADATA!r} here")
        fields["metadata"] = {**(fields.get("metadata") or {}), METADATA: message.to_metadata()}
        native = self.producer_of(options.get("queue"))
        item = native.preparer.job(None, fields, chosen, relay=RELAY)
        native.run_flow(submit_flow.submit(native.queue, item, "raise"))
        result = self.AsyncResult(chosen)
        if current_task and current_task.request.called_directly is False:
            current_task.add_trail(result)
        return result

    def producer_of(self, queue: Any = None) -> Producer:
        """Return the producer of a native queue: a name, or kombu's Queue of that name. None: the task's own."""
        name = str(getattr(queue, "name", queue) or self.producer.queue)
        if name == self.producer.queue:
            return self.producer
        with _producers_lock:
            if name not in self.others:
                self.others[name] = Producer(self.url, queue=name)
            return self.others[name]

    def _message(self, task_id: str, args: Any, kwargs: Any, options: Mapping[str, Any]) -> TaskMessage:
        """Return the message that Celery would have sent; it holds the links, the chain and the chord."""
        parent = current_task.request if current_task else None
        known = {name: options[name] for name in _MESSAGE_OPTIONS if options.get(name) is not None}
        known.setdefault("root_id", (parent.root_id or parent.id) if parent else task_id)
        known.setdefault("parent_id", parent.id if parent else None)
        hard, soft = self._limits(options)
        message = self.app.amqp.as_task_v2(
            task_id,
            self.name,
            args,
            kwargs,
            callbacks=maybe_list(options["link"]),
            errbacks=maybe_list(options["link_error"]),
            shadow=options["shadow"],
            ignore_result=options.get("ignore_result", self.ignore_result),
            time_limit=hard,
            soft_time_limit=soft,
            argsrepr="()",  # the job holds the prompt, and a log may show these
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

    def _limits(self, options: Mapping[str, Any]) -> tuple[float | None, float | None]:
        """Return the hard and the soft limit, in seconds."""
        hard = options.get("time_limit") or self.time_limit or self.app.conf.task_time_limit
        soft = options.get("soft_time_limit") or self.soft_time_limit or self.app.conf.task_soft_time_limit
        return hard, soft

    def _times(self, options: Mapping[str, Any]) -> dict[str, Any]:
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
        if limits := [limit for limit in self._limits(options) if limit]:
            times["timeout"] = float(min(limits))
        return times


_MESSAGE_OPTIONS = (
    "group_id", "group_index", "chord", "chain", "root_id", "parent_id", "reply_to", "stamped_headers",
)  # fmt: skip
_producers_lock = threading.Lock()


def generation_task(app: Celery, *, model: str | None = None, url: str | None = None, queue: str = "default",
                    name: str = TASK_NAME) -> GenerationTask:  # fmt: skip
    """Register the task in an app and return it. `url` and `queue` are as in Producer."""
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
