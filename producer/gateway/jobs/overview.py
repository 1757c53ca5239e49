"""A queue's figures and batches for the page of jobs, as flows (see effects.py). Bounded, however large the queue."""

from __future__ import annotations

from typing import Any

from pagemill.producer.client.effects import Flow
from pagemill.producer.wire.calls import batches as batch_calls
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import StatsPage, WorkerInfo
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import BatchInfo

MAX_PAGES = 20
MAX_LANES = 100


def queue(name: str, tenant: str) -> Flow[dict[str, Any]]:
    """Return the queue's figures. A tenant ('' for all) gets its own lanes, and no figure of anybody else's."""
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
    """Return batches of the tenant ('' for all), from the `after`-th of the queue on."""
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


def _lane(name: str, jobs: int, oldest_s: float) -> dict[str, Any]:
    _, priority, tenant, model = keys.split_lane(name)
    return {"priority": priority, "tenant": tenant, "model": model, "jobs": jobs, "oldest_s": oldest_s}


def _worker(worker: WorkerInfo) -> dict[str, Any]:
    shown = worker.model_dump(include={"id", "state", "models", "running"})
    return shown | {"url": registry.page_address(worker)}
