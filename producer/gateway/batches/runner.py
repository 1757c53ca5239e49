"""Runs the open batches that this gateway holds a lease on.

When a gateway dies its leases lapse, and another one, or the same one restarted, continues: it submits the
file's requests again under the same names, which does not affect those already submitted, and waits for the
outcomes, which the queue keeps until the files are written. File ids and contents are derived from the batch,
so writing them is idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagemill.producer.client import submit_flow
from pagemill.producer.client.aio_handles import AsyncBatchHandle
from pagemill.producer.client.effects import Flow
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.gateway.batches.stored_lines import StoredLines
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.openai.lines import (
    BatchAnswers,
    BatchRequest,
    BatchRequests,
    BatchSummary,
    RefusedFile,
)
from pagemill.producer.wire.calls.gateway import api_batches, stored_files
from pagemill.producer.wire.calls.gateway.api_batches import Claim
from pagemill.producer.wire.schema.errors import JobNotFound, PagemillError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import BatchItem

logger = logging.getLogger(__name__)

CHUNK = 200
"""Requests that are read, submitted or answered before yielding to other tasks."""


class _Lost(Exception):
    """The lease was lost to another gateway, or the batch has ended."""


class BatchRunner:
    """Looks for batches without a holder, and runs a few at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._news = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._is_blind = False
        """True while the queue does not answer."""

    def look_now(self) -> None:
        """Look for open batches now instead of at the next poll."""
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled; batches under way are then released for other gateways to continue."""
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
                if not self._is_blind:  # logged once, not at every try
                    logger.warning("open batches cannot be looked for now: %s", error)
                self._is_blind = True
                return
            self._is_blind = False
            if claim is None:
                return
            task = asyncio.create_task(BatchRun(self._gateway, claim).run())
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

    def __init__(self, gateway: Gateway, claim: Claim) -> None:
        self._gateway = gateway
        self._claim = claim
        self._queue = gateway.config.queue
        self._id = claim.batch.id
        self._tenant = claim.batch.values["tenant"]
        self._about: dict[str, Any] = json.loads(claim.batch.values["doc"])
        self._lease_ms = int(1000 * gateway.config.batch_lease_s)
        self._pause_s = min(1.0, gateway.config.batch_lease_s / 5)

    async def run(self) -> None:
        """Run to the end or until the lease is lost. If the queue is away, a gateway continues later."""
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
            self._gateway.in_background(self._let_go())
            raise
        finally:
            for task in (work, keeping):
                task.cancel()
            await asyncio.gather(work, keeping, return_exceptions=True)

    async def _keep(self) -> None:
        """Renew the lease and check for a cancel, independently of the work."""
        while True:
            await asyncio.sleep(self._pause_s)
            status = await self._save()
            if status == "cancelling":
                with contextlib.suppress(JobNotFound):
                    await self._batch.cancel()

    async def _let_go(self) -> None:
        with contextlib.suppress(PagemillError):
            await self._gateway.run(api_batches.save(self._queue, self._claim, {}, 0))

    async def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="pagemill-batch-") as directory:
            path = Path(directory) / "input.jsonl"
            requests = BatchRequests(path, deadline=float(self._about["expires_at"]))
            try:
                await self._fetch(path)
                total = await asyncio.to_thread(self._check, requests)
            except RefusedFile as error:
                await self._end("failed", errors=json.dumps(_errors(error)))
                return
            status = await self._save(status="in_progress", in_progress_at=_now(), total=total)
            if status != "cancelling":
                await self._submit(requests)
            await self._wait()
            await self._save(status="finalizing", finalizing_at=_now())
            await self._finish(requests)

    def _check(self, requests: BatchRequests) -> int:
        return requests.check(
            max_requests=self._gateway.config.max_batch_requests, url=self._about["endpoint"]
        )

    @property
    def _batch(self) -> AsyncBatchHandle:
        return self._gateway.producer.batch(self._id)

    async def _fetch(self, path: Path) -> None:
        """Copy the file's chunks to `path`. Raises RefusedFile when the file is gone."""
        file_id = self._about["input_file_id"]
        file = await self._gateway.run(stored_files.find(self._queue, self._tenant, file_id))
        with path.open("wb") as copy:
            for number in range(file.chunks if file is not None else 0):
                chunk = await self._gateway.run(stored_files.read(self._queue, file_id, number))
                if chunk is None:
                    raise RefusedFile("the file is gone", "file_gone")
                copy.write(chunk)

    async def _submit(self, requests: BatchRequests) -> None:
        """Submit all requests that are jobs, in the file's order; those already submitted are not duplicated.

        Jobs added to a batch after its cancel would run, so the status is checked before each chunk.
        """
        await self._gateway.models.look()
        chunks = _chunks(self._allowed(requests))
        while chunk := await asyncio.to_thread(next, chunks, None):
            if await self._save() == "cancelling":
                return
            jobs = [self._job(request.job, request) for request in chunk if isinstance(request.job, Job)]
            await self._gateway.producer.run_flow(self._submit_flow(jobs))

    def _submit_flow(self, jobs: list[Job]) -> Flow[None]:
        items = self._gateway.producer.preparer.items(jobs, self._id, on_invalid="record", by_content=True)
        counted = (item.under(self._about.get("api_key")) for item in items)
        return submit_flow.submit_many(self._queue, self._id, counted, "block", "record")

    def _allowed(self, requests: BatchRequests) -> Iterator[BatchRequest]:
        """Yield the file's requests; those for a model that the API key may not use become failures."""
        models = self._about["models"]
        for request in requests:
            if models is not None and isinstance(request.job, Job) and request.job.model not in models:
                refused = Failure("unknown_model", "the API key may not use this model")
                yield replace(request, job=refused)
            else:
                yield request

    def _job(self, job: Job, request: BatchRequest) -> Job:
        own = {
            "key": _key(request), "tenant": self._tenant, "priority": self._about["priority"],
            "dedupe": job.is_repeatable,
        }  # fmt: skip
        return job.model_copy(update=own | self._gateway.models.adapted(job.model))

    async def _wait(self) -> None:
        """Wait until every submitted job has ended, and publish progress for clients."""
        while True:
            try:
                counts = await self._batch.counts()
            except JobNotFound:
                return
            failed = counts.ended - counts.succeeded
            if await self._save(completed=counts.succeeded, failed=failed) == "cancelling":
                await self._batch.cancel()
            if counts.done:
                return
            await asyncio.sleep(self._pause_s)

    async def _finish(self, requests: BatchRequests) -> None:
        ttl_s = float(self._about["output_ttl_s"])
        output, errors = (
            StoredLines(self._gateway, self._tenant, _file_id(self._id, kind), f"{self._id}_{kind}.jsonl")
            for kind in ("output", "error")
        )
        with output, errors:
            summary = await self._answer(requests, output, errors)
            output_id, error_id = await output.store(ttl_s), await errors.store(ttl_s)
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

    async def _room(self) -> int:
        """Return the bytes the output may have: the tenant's files, it included, may take twice the quota."""
        files = await self._gateway.run(stored_files.find_all(self._queue, self._tenant))
        others = sum(file.size for file in files if file.id != _file_id(self._id, "output"))
        return max(0, 2 * self._gateway.config.max_tenant_bytes - others)

    async def _answer(
        self, requests: BatchRequests, output: StoredLines, errors: StoredLines
    ) -> BatchSummary:
        """Walk the file and the outcomes side by side; both are in (nearly) the same order."""
        answers, room = BatchAnswers(output, errors), await self._room()
        full = Failure(
            "output_too_large", "the tenant's files leave no room for it: delete some, and send it again"
        )
        ends = _Ends(self._batch)
        unknown = Failure("cancelled", "the batch was cancelled before this request was submitted")
        chunks = _chunks(self._allowed(requests))
        while chunk := await asyncio.to_thread(next, chunks, None):
            for request in chunk:
                key = _key(request)
                if isinstance(request.job, Failure):
                    end: dict[str, Any] | Failure = request.job
                else:
                    item = await ends.of(key)
                    end = unknown if item is None else _end(item, int(self._about["created_at"]))
                answers.add(request, f"{self._id[6:]}{key}"[-24:], full if output.size > room else end)
        return answers.summary

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

    async def _end(self, status: str, **values: Any) -> None:
        last = {"status": status, f"{status}_at": _now(), **values}
        if await self._gateway.run(api_batches.end(self._queue, self._claim, last)) is None:
            raise _Lost


class _Ends:
    """The outcomes of a batch's jobs, requested in the order of submission."""

    def __init__(self, batch: AsyncBatchHandle) -> None:
        self._items: AsyncIterator[BatchItem] = batch.results(ordered=True)
        self._early: dict[str, BatchItem] = {}

    async def of(self, key: str) -> BatchItem | None:
        """Return the job's outcome; None if it was never submitted."""
        if (found := self._early.pop(key, None)) is not None:
            return found
        with contextlib.suppress(StopAsyncIteration, JobNotFound):
            while (item := await anext(self._items)).key != key:
                self._early[item.key] = item
            return item
        return None


def _chunks(requests: Iterator[BatchRequest]) -> Iterator[list[BatchRequest]]:
    while chunk := list(itertools.islice(requests, CHUNK)):
        yield chunk


def _key(request: BatchRequest) -> str:
    return f"{request.number:08d}"


def _file_id(batch_id: str, kind: str) -> str:
    return f"file-{hashlib.blake2b(f'{batch_id} {kind}'.encode(), digest_size=12).hexdigest()}"


def _end(item: BatchItem, created: int) -> dict[str, Any] | Failure:
    if item.result is not None:
        return item.result.model_dump(include={"outputs", "usage", "model", "rows", "labels"}) | {
            "created": created
        }
    if item.error is None:
        return Failure(item.state, f"the job is {item.state}", True)
    return Failure(item.error.code, item.error.message, item.error.retryable)


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


def _now() -> int:
    return int(time.time())
