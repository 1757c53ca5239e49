"""A queue's statistics and batches for the jobs page, as bounded flows (see effects.py)."""

from __future__ import annotations

from typing import Any

from pagemill.producer.client.effects import Flow
from pagemill.producer.wire.calls import batches as batch_calls
from pagemill.producer.wire.calls import job_lists, purge, registry, transitions
from pagemill.producer.wire.calls.job_lists import JobFilter, JobPage
from pagemill.producer.wire.calls.purge import BatchOwners
from pagemill.producer.wire.calls.registry import StatsPage, WorkerInfo
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, BatchInfo

MAX_PAGES = 20
MAX_LANES = 100
CANCEL_JOBS = 100
"""Maximum jobs of a batch that one call cancels; each may have duplicates."""


def queue(name: str, tenant: str) -> Flow[dict[str, Any]]:
    """Return the queue's statistics. A tenant ('' for all) gets its own lanes, without data of other tenants."""
    page: StatsPage = yield registry.stats_page(name)
    totals, lanes = page.totals, dict(page.lanes)
    for _ in range(MAX_PAGES - 1):
        if page.cursor == "0":
            break
        page = yield registry.stats_page(name, page.cursor)
        lanes |= page.lanes
    workers: list[WorkerInfo] = yield registry.workers(name)
    rows = [_lane(lane, *figures) for lane, figures in sorted(lanes.items())]
    own = [row for row in rows if tenant in ("", row["tenant"])]
    found: dict[str, Any] = {
        "queue": name,
        "tenant": tenant,
        "paused": totals.paused,
        "waiting": sorted(own, key=lambda row: -row["jobs"])[:MAX_LANES],
        "lanes": len(own),
        "serving": sorted({model for worker in workers for model in worker.models}),
    }
    if not tenant:
        found |= {"counts": totals.counts, "leases": totals.leases, "dead": totals.dead}
        found |= {"followers": totals.followers, "workers": [_worker(worker) for worker in workers]}
    return found


def batches(name: str, tenant: str, after: int, limit: int) -> Flow[dict[str, Any]]:
    """Return batches of the tenant ('' for all), from the `after`-th of the queue on.

    A batch with jobs of several tenants is only shown to operators, since its counts include all its jobs.
    """
    shown: list[dict[str, Any]] = []
    for _ in range(MAX_PAGES):
        found: list[BatchInfo] = yield batch_calls.listed(name, after, batch_calls.LIST_BATCHES)
        for batch in found:
            after += 1
            if tenant in ("", batch.tenant):
                shown.append(batch.model_dump() | {"ended": batch.counts.ended})
            if len(shown) >= limit:
                return {"batches": shown, "after": str(after)}
        if len(found) < batch_calls.LIST_BATCHES:
            return {"batches": shown, "after": ""}
    return {"batches": shown, "after": str(after)}


def cancel_batch(name: str, tenant: str, batch_id: str) -> Flow[int | None]:
    """Cancel the tenant's jobs of a batch ('' for all). Returns the number stopped, None if there are none.

    A batch may have jobs of several tenants, so each job's tenant is checked.
    """
    owners: BatchOwners = yield purge.batch_owners(name, batch_id, 0)
    if tenant and owners.recorded not in ("", batch_calls.SEVERAL, tenant):
        return None
    wanted, place = JobFilter(tenant=tenant), "0"
    has_jobs, stopped = False, 0
    while place:
        page: JobPage = yield job_lists.listed(name, f"batch:{batch_id}", place, wanted, look=CANCEL_JOBS)
        has_jobs = has_jobs or bool(page.jobs)
        if ids := [job.id for job in page.jobs if job.state in ACTIVE_STATES]:
            replies: list[str] = yield transitions.cancel(name, ids)
            stopped += sum(reply in ("cancelled", "requested") for reply in replies)
        place = page.place
    return stopped if has_jobs else None


def _lane(name: str, jobs: int, oldest_s: float) -> dict[str, Any]:
    _, priority, tenant, model = keys.split_lane(name)
    return {"priority": priority, "tenant": tenant, "model": model, "jobs": jobs, "oldest_s": oldest_s}


def _worker(worker: WorkerInfo) -> dict[str, Any]:
    shown = worker.model_dump(include={"id", "state", "models", "running"})
    return shown | {"url": registry.page_address(worker)}
