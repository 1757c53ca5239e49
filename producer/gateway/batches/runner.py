"""Runs the open batches that this gateway holds a lease on.

When a gateway crashes, its leases lapse, and another or the restarted gateway continues: it submits the file's requests
again under the same names, which does not affect those already submitted, and writes the outcomes, which the queue
keeps until the files are complete. File ids and contents are derived from the batch, so writing them is idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pagemill.producer.client import submit_flow
from pagemill.producer.client.aio_handles import AsyncBatchHandle
from pagemill.producer.client.effects import Flow
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.gateway.batches.answers import GrowingAnswers
from pagemill.producer.gateway.batches.line_models import LineModels
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.webhooks import Webhooks, webhooks_of
from pagemill.producer.openai.lines import (
    BatchRequest,
    BatchRequests,
    BatchSummary,
    RefusedFile,
)
from pagemill.producer.wire.calls.gateway import api_batches, stored_files
from pagemill.producer.wire.calls.gateway.api_batches import Claim
from pagemill.producer.wire.schema.errors import JobNotFound, PagemillError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import BatchCounts
from pagemill.producer.wire.schema.sealing import SealedError

logger = logging.getLogger(__name__)

CHUNK = 200
"""Requests that are read, submitted or answered before yielding to other tasks."""


class _Lost(Exception):
    """The lease was lost to another gateway, or the batch has ended."""


class BatchRunner:
    """Polls for batches without a holder, and runs a few concurrently."""

    def __init__(self, gateway: Gateway, webhooks: Webhooks) -> None:
        self._gateway = gateway
        self._webhooks = webhooks
        self._news = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._is_blind = False
        """True while the queue does not respond."""

    def poll_now(self) -> None:
        """Poll for open batches now instead of at the next interval."""
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled; unfinished batches are then released for other gateways to continue."""
        config = self._gateway.config
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(config.batch_poll_s):
                        await self._news.wait()
                self._news.clear()
                await self._take()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _take(self) -> None:
        config = self._gateway.config
        while len(self._running) < config.max_running_batches:
            try:
                claim = await self._gateway.run(
                    api_batches.claim(config.queue, int(1000 * config.batch_lease_s))
                )
            except PagemillError as error:
                if not self._is_blind:  # logged once, not at every attempt
                    logger.warning("open batches cannot be looked for now: %s", error)
                self._is_blind = True
                return
            self._is_blind = False
            if claim is None:
                return
            task = asyncio.create_task(BatchRun(self._gateway, self._webhooks, claim).run())
            self._running.add(task)
            self._gateway.metrics.running_batches = len(self._running)
            task.add_done_callback(self._has_stopped)

    def _has_stopped(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._gateway.metrics.running_batches = len(self._running)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a batch stopped, and is tried again when its lease is over", exc_info=error)


class BatchRun:
    """One batch, for as long as the lease is held."""

    def __init__(self, gateway: Gateway, webhooks: Webhooks, claim: Claim) -> None:
        self._gateway = gateway
        self._webhooks = webhooks
        self._claim = claim
        self._queue = gateway.config.queue
        self._id = claim.batch.id
        self._tenant = claim.batch.values["tenant"]
        self._about: dict[str, Any] = json.loads(claim.batch.values["doc"])
        self._lease_ms = int(1000 * gateway.config.batch_lease_s)
        self._pause_s = min(1.0, gateway.config.batch_lease_s / 5)
        self._shown: str | None = None
        """The output file in the record."""
        self._models = LineModels(gateway.models, claim.batch.values, gateway.config.unknown_model_s)

    async def run(self) -> None:
        """Run to the end or until the lease is lost. If the queue is unavailable, a gateway continues later."""
        work = asyncio.ensure_future(self._work())
        keeping = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait({work, keeping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, keeping):
                if task.done():
                    task.result()
        except _Lost:
            logger.info("batch %s is another gateway's now", self._id)
        except PagemillError as error:
            logger.warning("batch %s waits for its lease to lapse: %s", self._id, error)
        except asyncio.CancelledError:
            self._gateway.in_background(self._release())
            raise
        finally:
            for task in (work, keeping):
                task.cancel()
            await asyncio.gather(work, keeping, return_exceptions=True)

    async def _keep(self) -> None:
        """Renew the lease and check for a cancellation, independently of the work."""
        while True:
            await asyncio.sleep(self._pause_s)
            status = await self._save()
            if status == "cancelling":
                with contextlib.suppress(JobNotFound):
                    await self._batch.cancel()

    async def _release(self) -> None:
        with contextlib.suppress(PagemillError):
            await self._gateway.run(api_batches.save(self._queue, self._claim, {}, 0))

    async def _work(self) -> None:
        found = self._claim.batch.values
        if "event" in found:
            await self._notify(found["event"], float(found["event_at"]), int(found["event_tries"]))
            return
        with tempfile.TemporaryDirectory(prefix="pagemill-batch-") as directory:
            path = Path(directory) / "input.jsonl"
            requests = BatchRequests(path, deadline=float(self._about["expires_at"]))
            try:
                await self._fetch(path)
                total = await asyncio.to_thread(self._check, requests)
            except RefusedFile as error:
                await self._end("failed", errors=json.dumps(_errors(error)))
                return
            except SealedError as error:  # until the batch expires, another gateway may have the key
                if await self._now() < float(self._about["expires_at"]):
                    raise
                await self._end("failed", errors=json.dumps(_errors(RefusedFile(str(error), error.code))))
                return
            status = await self._save(status="in_progress", in_progress_at=await self._now(), total=total)
            answers = GrowingAnswers(
                self._gateway, self._tenant, self._id, self._about, requests, partial(_file_id, self._id)
            )
            with answers:
                await answers.resume()
                if status != "cancelling":
                    await self._submit(requests, answers)
                await self._wait(requests, answers)
                status = await self._save(status="finalizing", finalizing_at=await self._now(), errors="")
                await self._finish(answers, self._unsubmitted(status))

    def _check(self, requests: BatchRequests) -> int:
        return requests.check(
            max_requests=self._gateway.config.max_batch_requests, url=self._about["endpoint"]
        )

    @property
    def _batch(self) -> AsyncBatchHandle:
        return self._gateway.producer.batch(self._id)

    async def _fetch(self, path: Path) -> None:
        """Copy the file's chunks to `path`. Raises RefusedFile if the file no longer exists."""
        file_id = self._about["input_file_id"]
        file = await self._gateway.run(stored_files.find(self._queue, self._tenant, file_id))
        if file is None:
            raise RefusedFile("the file no longer exists", "file_gone")
        with path.open("wb") as copy:
            for number in range(file.chunks):
                chunk = await self._gateway.run(stored_files.read(self._queue, file_id, number))
                if chunk is None:
                    raise RefusedFile("the file no longer exists", "file_gone")
                copy.write(chunk)

    async def _submit(
        self, requests: BatchRequests, answers: GrowingAnswers, only: set[str] | None = None
    ) -> None:
        """Submit the requests of accepted models, or only of those in `only`, in the file's order.

        Those already submitted are not duplicated. Jobs added to a batch after its cancellation would run, so the
        status is checked before each chunk.
        """
        chunks = _chunks(map(self._checked, requests))
        while chunk := await asyncio.to_thread(next, chunks, None):
            await self._models.read(chunk)
            status, _ = await self._save_counts(**self._models.record())
            if status == "cancelling":
                return
            wanted = self._models.accepted if only is None else only
            fields = await self._gateway.models.known(wanted)
            jobs = [
                self._job(request.job, request, fields.get(request.job.model, {}))
                for request in chunk
                if isinstance(request.job, Job) and request.job.model in wanted
            ]
            await self._gateway.producer.run_flow(self._submit_flow(jobs))
            await self._show(answers)

    def _submit_flow(self, jobs: list[Job]) -> Flow[None]:
        items = self._gateway.producer.preparer.items(jobs, self._id, on_invalid="record", by_content=True)
        counted = (item.under(self._about.get("api_key")) for item in items)
        return submit_flow.submit_many(self._queue, self._id, counted, "block", "record")

    def _checked(self, request: BatchRequest) -> BatchRequest:
        """Return the request, or a failure if the API key may not use its model."""
        models = self._about["models"]
        if models is not None and isinstance(request.job, Job) and request.job.model not in models:
            return replace(request, job=Failure("model_not_allowed", "the API key may not use this model"))
        return request

    def _job(self, job: Job, request: BatchRequest, fields: dict[str, str]) -> Job:
        own = {
            "key": _key(request), "tenant": self._tenant, "priority": self._about["priority"],
            "dedupe": job.is_repeatable,
        }  # fmt: skip
        return job.model_copy(update=own | fields)

    async def _show(self, answers: GrowingAnswers) -> None:
        """Publish the responses so far."""
        if (file_id := await answers.grow()) is not None and file_id != self._shown:
            await self._save(output_file_id=file_id)
            self._shown = file_id

    async def _wait(self, requests: BatchRequests, answers: GrowingAnswers) -> None:
        """Wait until every job has ended and every model is decided, and publish progress for clients."""
        while True:
            found = await self._models.refresh()
            values = self._models.record() | {"errors": self._models.waiting()}
            status, counts = await self._save_counts(**values)
            if status == "cancelling":
                await self._batch.cancel()
            elif found:
                await self._submit(requests, answers, found)
                continue
            if counts.ended:
                await self._show(answers)
            has_ended = status == "cancelling" or await self._now() >= self._about["expires_at"]
            if counts.done and (has_ended or not self._models.undecided):
                return
            await asyncio.sleep(self._pause_s)

    async def _save_counts(self, **values: Any) -> tuple[str, BatchCounts]:
        """Save values with the counts of the jobs; returns the status and the counts."""
        counts = await self._counts()
        failed = counts.ended - counts.succeeded
        return await self._save(completed=counts.succeeded, failed=failed, **values), counts

    async def _counts(self) -> BatchCounts:
        """Return the counts of the jobs; all are 0 before the first submission."""
        try:
            return await self._batch.counts()
        except JobNotFound:
            return BatchCounts()

    def _unsubmitted(self, status: str) -> Failure:
        """Return the outcome of requests for models that were not accepted."""
        if self._models.is_final:
            return Failure("model_not_found", "the model does not exist")
        if status == "cancelling":
            return Failure("cancelled", "the batch was cancelled before this request was submitted")
        return Failure("deadline_exceeded", "no worker served the model within the completion window")

    async def _finish(self, answers: GrowingAnswers, unsubmitted: Failure) -> None:
        unknown = Failure("cancelled", "the batch was cancelled before this request was submitted")

        def missing(request: BatchRequest) -> Failure:
            job = self._checked(request).job
            if isinstance(job, Failure):
                return job
            return unknown if job.model in self._models.accepted else unsubmitted

        summary, output_id, error_id = await answers.finish(missing)
        await self._end(
            self._last_status(summary, await self._save()),
            output_file_id=output_id or "",
            error_file_id=error_id or "",
            total=summary.total,
            completed=summary.completed,
            failed=summary.failed,
            usage=json.dumps(_usage(summary)),
        )
        with contextlib.suppress(PagemillError):
            await self._batch.ack(f"s{summary.total}")

    def _last_status(self, summary: BatchSummary, now: str) -> str:
        if now == "cancelling":
            return "cancelled"
        return "expired" if summary.codes.get("deadline_exceeded") else "completed"

    async def _save(self, **values: Any) -> str:
        """Save values, renew the lease and return the status. Raises _Lost."""
        status = await self._gateway.run(api_batches.save(self._queue, self._claim, values, self._lease_ms))
        if status is None:
            raise _Lost
        return status

    async def _now(self) -> int:
        return int(await self._gateway.now())

    async def _end(self, status: str, **values: Any) -> None:
        last = {"status": status, f"{status}_at": await self._now(), **values}
        event = f"batch.{status}"
        if await webhooks_of(self._gateway, self._tenant, event):
            # For clients it has ended; the lease is kept until its webhooks are notified.
            at = last[f"{status}_at"]
            await self._save(**last, event=event, event_at=at, event_tries=1)
            await self._notify(event, at, 1)
            return
        if await self._gateway.run(api_batches.end(self._queue, self._claim, last)) is None:
            raise _Lost

    async def _notify(self, event: str, at: float, tries: int) -> None:
        """Deliver the batch's event; the lease ends with the last attempt. Raises _Lost.

        Args:
            at: Unix seconds of the event.
            tries: Attempts, including this one.
        """
        again_s = await self._webhooks.deliver(self._tenant, event, self._id, at, tries)
        if again_s is None:
            # This overwrites a cancellation that was too late.
            call = api_batches.end(self._queue, self._claim, {"status": event.removeprefix("batch.")})
        else:
            lease_ms = max(1, round(1000 * again_s))
            call = api_batches.save(self._queue, self._claim, {"event_tries": tries + 1}, lease_ms)
        if await self._gateway.run(call) is None:
            raise _Lost


def _chunks(requests: Iterator[BatchRequest]) -> Iterator[list[BatchRequest]]:
    while chunk := list(itertools.islice(requests, CHUNK)):
        yield chunk


def _key(request: BatchRequest) -> str:
    return f"{request.number:08d}"


def _file_id(batch_id: str, kind: str) -> str:
    return f"file-{hashlib.blake2b(f'{batch_id} {kind}'.encode(), digest_size=12).hexdigest()}"


def _errors(error: RefusedFile) -> dict[str, Any]:
    row = {"code": error.code, "message": error.reason, "line": error.line, "param": None}
    return {"object": "list", "data": [row]}


def _usage(summary: BatchSummary) -> dict[str, Any]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": summary.cached_tokens},
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }
