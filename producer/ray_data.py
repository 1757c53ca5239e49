"""Ray Data through the queue: the rows of a dataset as jobs, their results as columns.

    from pagemill.producer.ray_data import through_queue

    def job(row):
        return {"model": "model", "prompt": f"Label this: {row['text']}", "max_tokens": 8, "temperature": 0.0}

    labeled = through_queue(ray.data.read_parquet("rows/"), job, run="labels-2026-11")

Ray's actors hold no model: they submit and wait, and the queue's workers compute. A job's id is derived from
the run and from what the job computes, so a batch that Ray reassigns to another actor, after a kill or a lost
node, finds its jobs: finished ones are read, others awaited, none runs twice. Every input row comes out once.

Importing this loads neither Ray nor numpy; `pip install 'pagemill[ray]'` installs Ray.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pagemill.producer.client import preparer
from pagemill.producer.client.images import parse_job
from pagemill.producer.client.preparer import JobLike
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema.errors import InvalidJob, JobError, JobNotFound, ResultExpired
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Result

if TYPE_CHECKING:
    from ray.data import Dataset

JobOfRow: TypeAlias = Callable[[Mapping[str, Any]], JobLike]
Batch: TypeAlias = Mapping[str, Sequence[Any]]

OUTPUT_COLUMNS = ("output", "finish_reason", "error", "prompt_tokens", "completion_tokens")
"""`error` is the code of a job without a result, whose `output` is empty; otherwise `error` is empty."""
WINDOW = 256
BATCH_ROWS = 1024
SUBMISSIONS = 3
"""Maximum submissions of a job that the server has lost; further losses are an error."""


def through_queue(
    dataset: Dataset,
    job: JobOfRow,
    *,
    run: str,
    url: str | None = None,
    queue: str = "default",
    tenant: str = "default",
    actors: int = 2,
    window: int = WINDOW,
    batch_rows: int = BATCH_ROWS,
    num_cpus: float = 0.1,
) -> Dataset:
    """Add the outputs of jobs to every row of a dataset, in OUTPUT_COLUMNS. Lazy, like all of Ray Data.

    Args:
        dataset: the rows.
        job: maps a row to the fields of a job. Equal jobs are one job, unless their `key` differs.
        run: name of the work. Under the same name, finished rows are not computed again, failed ones included.
        url: the queue's server. Default: PAGEMILL_REDIS_URL in the actors' environment; PAGEMILL_HMAC_KEYS signs jobs.
        queue: name of the queue.
        tenant: owner of the jobs.
        actors: number of actors. `actors` times `window` should be twice the jobs that the workers run together.
        window: maximum jobs of an actor in the queue.
        batch_rows: maximum rows that Ray repeats.
        num_cpus: CPUs that an actor reserves.

    Returns:
        The dataset with the added columns.

    Raises:
        InvalidJob: an option is invalid. Actors raise the errors of a Producer.
    """
    from ray.data import ActorPoolStrategy

    options: dict[str, Any] = {"run": run, "url": url, "queue": queue, "tenant": tenant, "window": window}
    QueueActor(job, **options).close()  # reports invalid options here and not on every node
    if actors < 1 or batch_rows < 1:
        raise InvalidJob("actors and batch_rows are 1 or more")
    return dataset.map_batches(
        QueueActor,
        fn_constructor_args=(job,),
        fn_constructor_kwargs=options,
        batch_size=batch_rows,
        batch_format="numpy",
        compute=ActorPoolStrategy(size=actors),
        num_cpus=num_cpus,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's job, with the same id on every actor; or the error code of an invalid row."""

    job_id: str
    job: Job | None
    code: str = ""


class QueueActor:
    """A callable that processes one batch of rows at a time; for `map_batches` with custom options."""

    def __init__(
        self,
        job: JobOfRow,
        *,
        run: str,
        url: str | None = None,
        queue: str = "default",
        tenant: str = "default",
        window: int = WINDOW,
    ) -> None:
        """Takes the options of `through_queue`. Connects with the first batch."""
        if window < 1:
            raise InvalidJob("window is 1 or more")
        self._job = job
        self._run = preparer.check_id(run)
        self._window = window
        self._tenant = tenant
        self._producer = Producer(url, queue=queue, tenant=tenant)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with OUTPUT_COLUMNS, in its order, once every row's job has ended."""
        if taken := [name for name in OUTPUT_COLUMNS if name in batch]:
            raise InvalidJob(f"the rows have columns {', '.join(taken)} already; rename them first")
        rows = [self._prepared(row) for row in _rows(batch)]
        jobs = {row.job_id: row.job for row in rows if row.job is not None}
        ended = {job_id: _columns(end) for job_id, end in self._ends(jobs)}
        found = [ended[row.job_id] if row.job is not None else _columns(row.code) for row in rows]
        added = {name: [columns[i] for columns in found] for i, name in enumerate(OUTPUT_COLUMNS)}
        return {**batch, **added}

    def close(self) -> None:
        self._producer.close()

    def _prepared(self, row: Mapping[str, Any]) -> _Row:
        try:
            given = self._job(row)
            if not isinstance(given, Job):
                given = parse_job({"tenant": self._tenant, **given})
            elif "tenant" not in given.model_fields_set:
                given = given.model_copy(update={"tenant": self._tenant})
            # Equal work of a tenant is one job, regardless of Ray's batches; a key alone does not make work equal.
            # Hashed, since a key may have the maximum length.
            work = f"{given.tenant}\0{given.key or ''}\0{given.digest()}"
            key = hashlib.blake2b(work.encode(), digest_size=16).hexdigest()
            keyed = given.model_copy(update={"key": key})
            keyed.to_payload(max_bytes=self._producer.preparer.max_bytes)  # raises if the job is too large
        except InvalidJob as error:
            return _Row("", None, error.code)
        return _Row(preparer.item_id(self._run, key), keyed)

    def _ends(self, jobs: Mapping[str, Job]) -> Iterator[tuple[str, Result | str]]:
        """Yield each job's result or error code, with up to a window of unfinished jobs."""
        ids = list(jobs)
        step = max(1, self._window // 4)
        sent = 0
        for collected, job_id in enumerate(ids):
            while sent < len(ids) and sent - collected <= self._window - step:
                self._submit(jobs[name] for name in ids[sent : sent + step])
                sent += step
            yield job_id, self._end(job_id, jobs[job_id])

    def _submit(self, jobs: Iterable[Job]) -> None:
        # One batch id, since an item's id is derived from it and the key. Waits while the queue is full.
        self._producer.submit_many(jobs, batch_id=self._run, on_full="block")

    def _end(self, job_id: str, job: Job) -> Result | str:
        for _ in range(SUBMISSIONS):
            try:
                return self._producer.job(job_id).result()
            except JobError as error:
                return error.code or error.state
            except (JobNotFound, ResultExpired):
                self._submit([job])  # no effect if the batch still knows that this job was freed
        raise JobNotFound(
            f"job {job_id} of run {self._run} was done before, and its result has been removed: name another run"
        )


def forget(run: str, url: str | None = None, *, queue: str = "default") -> int:
    """Free the results of a run on the server, once the dataset is stored.

    Otherwise they are kept for 7 days. Waits for jobs that have not ended. The run's name cannot be used again.

    Args:
        run: name of the run.
        url: the queue's server.
        queue: name of the queue.

    Returns:
        The number of freed results.

    Raises:
        JobNotFound: the run was never started.
    """
    with Producer(url, queue=queue) as producer:
        batch = producer.batch(preparer.check_id(run))
        freed, cursor = 0, None
        for item in batch.results():
            cursor = item.cursor
        if cursor is not None:
            freed = batch.ack(cursor)
        return freed


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    """Yield the batch's rows, with numpy scalars as Python numbers, strings and times."""
    for values in zip(*batch.values(), strict=True):
        plain = (_plain(value) if getattr(value, "shape", None) == () else value for value in values)
        yield dict(zip(batch, plain, strict=True))


def _plain(scalar: Any) -> Any:
    """Return a numpy scalar as a Python value. Times in nanoseconds would become integers."""
    if scalar.dtype.kind in "mM":
        scalar = scalar.astype(f"{scalar.dtype.kind}8[us]")
    return scalar.item()


def _columns(end: Result | str) -> tuple[str, str, str, int, int]:
    """Return a row's values for OUTPUT_COLUMNS, with fixed types, so that all blocks have one schema."""
    if isinstance(end, str):
        return "", "", end, 0, 0
    usage = end.usage
    return end.text, end.finish_reason or "", "", usage.prompt_tokens, usage.completion_tokens
