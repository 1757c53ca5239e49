"""The producer for threads: submits jobs, and returns handles to them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from pagemill.producer.client import flows, preparer, submit_flow, usage_flow
from pagemill.producer.client.base import Driver
from pagemill.producer.client.effects import (
    Begin,
    Delete,
    Effect,
    Emit,
    Finish,
    Flow,
    Read,
    Sleep,
    Sync,
    Wait,
    Watch,
    Write,
)
from pagemill.producer.client.handles import BatchHandle, DeadLetters, JobHandle
from pagemill.producer.client.job_fields import JobFields
from pagemill.producer.client.listener import Listener, Watched
from pagemill.producer.client.preparer import JobLike, OnInvalid
from pagemill.producer.client.purge import flow as purge
from pagemill.producer.client.purge.report import PurgeOptions, PurgeProgress, PurgeReport
from pagemill.producer.client.replay import flow as replay
from pagemill.producer.client.replay.flow import Placement, ReplayOptions
from pagemill.producer.client.replay.verification import Verification
from pagemill.producer.client.rollout.handles import ModelRollout
from pagemill.producer.client.submit_flow import OnFull, OnLate
from pagemill.producer.client.tracing import publishing
from pagemill.producer.wire.calls.metering.usage import GROUPS, UsageFilter, UsageRow
from pagemill.producer.wire.schema.outputs import BatchInfo, JobStatus
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.discovery import find_redis
from pagemill.producer.wire.server.transport import Pending, SyncTransport

T = TypeVar("T")


class Producer(Driver):
    """Submits jobs to one queue and collects results. Thread-safe; connects on first use.

    A forked child opens its own connections. A context manager, which closes them at the end. Every method may raise
    RedisUnavailable.

        with Producer() as producer:
            handle = producer.submit(prompt="The capital of France is", model="smollm2")
            print(handle.result(timeout=60).text)

    Args:
        url: the server. Default: PAGEMILL_REDIS_URL, otherwise the embedded server of a local worker.
        queue: name of the queue.
        tenant: owner of the jobs.
        hmac_key: key that signs every job. Default: the first of PAGEMILL_HMAC_KEYS, if set.
        durability: "fsync": a submission returns once it is in the server's append-only file on disk.
        model: model of jobs that name none. Default: the model of the live workers, if they serve exactly one.
        defaults: fields of jobs that do not set them; a `Job` is not changed.
        store: location of payloads and results too large for Redis (docs/storage.md). Default: PAGEMILL_STORE_URL.

    Raises:
        InvalidJob: an option is invalid.
        InvalidAddress: the URL is invalid.
    """

    def _init_connection(self) -> None:
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def submit(
        self,
        job: JobLike | None = None,
        /,
        *,
        job_id: str | None = None,
        on_full: OnFull = "raise",
        estimate: OnLate | None = None,
        **fields: Unpack[JobFields],
    ) -> JobHandle:
        """Submit one job: a Job, a mapping, or its fields as keywords.

        Args:
            job: a Job or a mapping; None if the fields are keywords.
            job_id: the job's id, by default a new one. After RedisUnavailable,
                `submit(..., job_id=error.job_id)` is safe.
            on_full: "raise" raises QueueFull, "block" waits for space.
            estimate: estimate when the job will end (`handle.estimate`). After its deadline, "flag" submits it anyway,
                "refuse" raises DeadlineUnreachable.
            **fields: fields of `Job`.

        Returns:
            A handle to the job.

        Raises:
            InvalidJob: a field is invalid, or fields contradict each other.
            QueueFull: the queue accepts no more jobs.
            DeadlineUnreachable: the job would probably miss its deadline, and `estimate` is "refuse".
            IdempotencyConflict: the idempotency key belongs to a job with other contents.
            RedisUnavailable: the server did not respond; the job may have been submitted.
        """
        chosen = preparer.new_job_id() if job_id is None else preparer.check_id(job_id)
        if self.preparer.lacks_model(job, fields):
            fields["model"] = self.run_flow(flows.served_model(self.queue))
        with publishing(self.queue, job, fields) as traceparent:
            item = self.preparer.job(job, fields, chosen, traceparent=traceparent)
            flow = submit_flow.submit_with_estimate(self.queue, item, on_full, estimate)
            return JobHandle(self, *self.run_flow(flow))

    def submit_many(
        self,
        jobs: Iterable[JobLike],
        *,
        batch_id: str | None = None,
        on_invalid: OnInvalid = "record",
        on_full: OnFull = "block",
    ) -> BatchHandle:
        """Submit jobs as a batch, and return when all are accepted.

        Args:
            jobs: Jobs or mappings, read lazily. A job's `key` names it inside the batch. If the first job names no
                model, jobs without one get the model that the live workers serve.
            batch_id: the batch's id, by default a new one. Submitting the same keys under the same id again adds only
                missing jobs.
            on_invalid: "record" makes an invalid job a failed item of the batch, "raise" raises InvalidJob; earlier
                jobs stay submitted.
            on_full: "block" waits for space, "raise" raises QueueFull.

        Returns:
            A handle to the batch.

        Raises:
            InvalidJob: a job is invalid and `on_invalid` is "raise", or the batch's id is invalid.
            IdempotencyConflict: a key belongs to a job with other contents, and `on_invalid` is "raise".
            QueueFull: the queue accepts no more jobs, and `on_full` is "raise".
            RedisUnavailable: the server did not respond; some jobs may have been submitted.
        """
        chosen = preparer.new_batch_id() if batch_id is None else preparer.check_id(batch_id)
        jobs, first = preparer.peeked(jobs)
        model = self.run_flow(flows.served_model(self.queue)) if self.preparer.lacks_model(first) else None
        with publishing(self.queue) as traceparent:
            items = self.preparer.items(
                jobs,
                chosen,
                on_invalid=on_invalid,
                by_content=batch_id is not None,
                compares_work=True,
                traceparent=traceparent,
                model=model,
            )
            self.run_flow(submit_flow.submit_many(self.queue, chosen, items, on_full, on_invalid))
        return BatchHandle(self, chosen)

    def job(self, job_id: str) -> JobHandle:
        """Return a handle to a job that was submitted elsewhere or earlier, without a call to the server.

        Args:
            job_id: the job's id.

        Returns:
            A handle; its methods raise JobNotFound if the queue does not have the job.

        Raises:
            InvalidJob: the id contains other characters than ids do.
        """
        return JobHandle(self, preparer.check_id(job_id))

    def batch(self, batch_id: str) -> BatchHandle:
        """Return a handle to a batch that was submitted elsewhere or earlier, without a call to the server.

        Args:
            batch_id: the batch's id.

        Returns:
            A handle; its methods raise JobNotFound if the queue does not have the batch.

        Raises:
            InvalidJob: the id contains other characters than ids do.
        """
        return BatchHandle(self, preparer.check_id(batch_id))

    def batches(self) -> Iterator[BatchInfo]:
        """Yield the queue's batches, of all tenants, the latest first. Batches are kept for a week after their end."""
        return self.iterate_flow(flows.batch_infos(self.queue))

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return the status of many jobs in one call.

        Args:
            job_ids: the jobs' ids.

        Returns:
            One status per id, in the same order.

        Raises:
            JobNotFound: the queue does not have one of the jobs.
        """
        return self.run_flow(flows.statuses(self.queue, job_ids))

    def dead_letters(self) -> DeadLetters:
        """Return the queue's dead letters, of all tenants, for its operator."""
        return DeadLetters(self)

    def usage(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        tenant: str | None = None,
        model: str | None = None,
        by: Sequence[str] = GROUPS,
    ) -> list[UsageRow]:
        """Return usage of all tenants, for the queue's operator; docs/usage.md defines what is counted.

        Args:
            since: first day (UTC) on which jobs ended; None: the oldest that is kept.
            until: last day, included; None: today.
            tenant: only this tenant.
            model: only this model.
            by: fields to group by: some of day, tenant, model and api_key.

        Returns:
            One row per group.

        Raises:
            InvalidJob: `by` contains another field.
        """
        wanted = UsageFilter(since, until, tenant, model, tuple(by))
        return self.run_flow(usage_flow.usage(self.queue, wanted))

    def verify(
        self, job_id: str, *, timeout: float | None = None, **options: Unpack[Placement]
    ) -> Verification:
        """Run a finished job again with its seed and compare both results; see docs/replay.md.

        Args:
            job_id: a job that was submitted with `keep_input=True` and has succeeded.
            timeout: seconds to wait for the copy; None: no limit.
            **options: `priority` of the copy ("low"), and `any_worker`: also use workers with another fingerprint.

        Returns:
            The comparison.

        Raises:
            Unverifiable: no verdict is possible.
            ResultTimeout: the copy has not ended in time.
            QueueFull: the queue accepts no more jobs.
            JobNotFound: the queue does not have the job.
        """
        chosen = ReplayOptions(timeout=timeout, **options)
        return self.run_flow(replay.verify(self.queue, self.preparer, preparer.check_id(job_id), chosen))

    def verify_batch(
        self,
        batch_id: str,
        sample: int = 50,
        *,
        timeout: float | None = None,
        **options: Unpack[Placement],
    ) -> Iterator[Verification]:
        """Verify random jobs of a batch.

        Args:
            batch_id: the batch's id.
            sample: maximum number of jobs.
            timeout: seconds to wait for each copy; None: no limit.
            **options: as for `verify`.

        Yields:
            One comparison per job; one without a verdict has a `reason`.

        Raises:
            JobNotFound: the queue does not have the batch.
        """
        chosen = ReplayOptions(timeout=timeout, **options)
        flow = replay.verify_batch(self.queue, self.preparer, preparer.check_id(batch_id), sample, chosen)
        return self.iterate_flow(flow)

    def rollout(self, model: str) -> ModelRollout:
        """Return the rollout of a model, to start, inspect and change it; see docs/rollouts.md.

        Args:
            model: the model's served name.

        Returns:
            A handle; no call is made to the server.
        """
        return ModelRollout(self, model)

    def purge_tenant(
        self,
        tenant: str,
        options: PurgeOptions | None = None,
        *,
        on_progress: Callable[[PurgeProgress], None] = lambda progress: None,
    ) -> PurgeReport:
        """Remove all data of a tenant from the queue, then search every key for remains; see docs/confidentiality.md.

        The tenant's new jobs are rejected meanwhile, as by a full queue.

        Args:
            tenant: the tenant's name.
            options: wait, dry run and further data to remove.
            on_progress: called after each step.

        Returns:
            Counts of removed data; `remains` is empty if nothing was found.

        Raises:
            InvalidJob: the tenant's name or an option is invalid.
            StoreError: files in the store cannot be deleted.
        """
        flow = purge.purge_tenant(
            self.queue, tenant, options or PurgeOptions(), has_store=self.store is not None
        )
        for item in self.iterate_flow(flow):
            if isinstance(item, PurgeReport):
                return item
            on_progress(item)
        raise AssertionError("a purge ends with its report")

    def close(self) -> None:
        """Close the connections. Later use opens new ones."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None and connection.pid == os.getpid():
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run_flow(self, flow: Flow[T]) -> T:
        """Drive a flow that emits nothing, and return its value."""
        self._connected()  # outside the loop, so that a server that is not found is an immediate error, without retries
        begun: list[Pending[Any]] = []
        try:
            effect = next(flow)
            while True:
                try:
                    value = self._perform(effect, {})
                    if isinstance(effect, Begin):
                        begun = [value]
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()
            for pending in begun:
                pending.abandon()

    def iterate_flow(self, flow: Flow[None]) -> Iterator[Any]:
        """Drive a flow, yielding its items as they are requested."""
        watches: dict[str, Watched] = {}
        try:
            effect = next(flow)
            while True:
                if isinstance(effect, Emit):
                    yield effect.item
                    effect = next(flow)
                    continue
                try:
                    value = self._perform(effect, watches)
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(value)
        except StopIteration:
            return
        finally:
            flow.close()
            for watched in watches.values():
                watched.close()

    def _perform(self, effect: Effect, watches: dict[str, Watched]) -> Any:
        match effect:
            case Begin(call):
                return self._connected().transport.begin(call)
            case Finish(pending):
                return pending.finish()
            case Sync():
                if self._durability == "fsync":
                    self._connected().transport.sync(self.queue)
            case Write(uploads):
                self.write_stored(uploads)
            case Read(reference):
                return self.read_stored(reference)
            case Delete(uris):
                self.delete_stored(uris)
            case Sleep(seconds):
                time.sleep(seconds)
            case Watch(topic):
                watches[topic] = self._connected().listener.watch(topic)
            case Wait(topic, timeout) if topic in watches:
                watches[topic].wait(timeout)
            case Wait(topic, timeout, polled):
                self._connected().listener.wait(topic, timeout, polled=polled)
            case Emit():
                raise AssertionError("a flow that emits was run for its value")
            case call:
                return self._connected().transport.run(call)
        return None

    def _connected(self) -> _Connection:
        connection = self._connection
        if connection is None or connection.pid != os.getpid():
            # A lock that was held during a fork is never released in the child.
            lock = self._lock if connection is None or connection.pid == os.getpid() else threading.Lock()
            with lock:
                connection = self._connection
                if connection is None or connection.pid != os.getpid():
                    connection = _Connection(find_redis(self._url), self.queue)
                    self._lock, self._connection = lock, connection
        return connection


class _Connection:
    """The state of one process: a client, its transport and a listener."""

    def __init__(self, url: str, queue: str) -> None:
        self.pid = os.getpid()
        retry = Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2)
        self.transport = SyncTransport(open_client(url, queue, retry=retry))
        self.listener = Listener(self.transport, queue)

    def close(self) -> None:
        self.listener.close()
        self.transport.close()
