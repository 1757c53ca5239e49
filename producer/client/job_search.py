"""Finding jobs by state, tenant, model, key and batch, as a flow (see effects.py).

Every step reads some hundred jobs, and a search has a bounded number of steps: then it returns where to continue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.producer.client.effects import Flow
from pagemill.producer.client.preparer import check_id
from pagemill.producer.wire.calls import job_lists, registry
from pagemill.producer.wire.calls.job_lists import JobFilter, JobLine, JobPage
from pagemill.producer.wire.calls.registry import StatsPage
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob

MAX_STEPS = 100
MAX_LANE_PAGES = 20
_LISTS = ("running", "delayed", "dead")
_SEPARATOR = "~"
_END = 2**53
"""A position after the last job of any list: positions are numbers of Lua."""
_LARGEST_CURSOR = 2**64 - 1


@dataclass(slots=True)
class FoundJobs:
    """Some jobs, about as many as requested. `after` is where to continue, '' at the end."""

    jobs: list[JobLine] = field(default_factory=list)
    after: str = ""
    looked: int = 0
    """Number of jobs read, or for a search through all of them, those seen in the part of the keyspace."""


def search(
    queue: str, wanted: JobFilter, *, batch: str = "", after: str = "", limit: int = 50
) -> Flow[FoundJobs]:
    """Return jobs: of a batch in order of submission; waiting ones by class and lane; dead ones, the latest first.

    Ended jobs without a batch are found by a walk through the keyspace, in undefined order; one that has the
    idempotency key comes first. Raises InvalidJob for an `after` of another search.
    """
    found = FoundJobs()
    if batch:
        source = f"batch:{check_id(batch)}"
    elif wanted.state == "queued":
        yield from _waiting(queue, wanted, after, limit, found)
        return found
    else:
        source = wanted.state if wanted.state in _LISTS else "all"
    if source == "all" and wanted.key and wanted.tenant and not after:
        page: JobPage = yield job_lists.listed(queue, f"key:{wanted.tenant}:{wanted.key}", "0", wanted)
        if page.jobs:
            return FoundJobs(page.jobs, after="0", looked=page.looked)
    place = _place(after, _LARGEST_CURSOR if source == "all" else _END)
    yield from _walk(queue, source, place, wanted, limit, found)
    found.jobs = list({job.id: job for job in found.jobs}.values())
    return found


def _walk(queue: str, source: str, place: str, wanted: JobFilter, limit: int, found: FoundJobs) -> Flow[int]:
    """Read until there are enough jobs, or for `MAX_STEPS`; returns the steps."""
    look = limit if source == "all" else job_lists.LOOK_JOBS
    steps = 0
    while steps < MAX_STEPS:
        steps += 1
        most = limit - len(found.jobs)
        page: JobPage = yield job_lists.listed(queue, source, place, wanted, look=look, most=most)
        found.jobs += page.jobs
        found.looked += page.looked
        found.after = place = page.place
        # A walk cannot be interrupted in the middle of a step, so it starts with short ones.
        look = min(2 * look, job_lists.LOOK_JOBS)
        if not place or len(found.jobs) >= limit:
            break
    return steps


def _waiting(queue: str, wanted: JobFilter, after: str, limit: int, found: FoundJobs) -> Flow[None]:
    """Read the lanes of the tenant and model sequentially."""
    place, _, first = after.partition(_SEPARATOR)
    place = _place(place)
    steps = 0
    for lane in (yield from _lanes(queue, wanted)):
        if lane < first:
            continue
        start = place if lane == first else "0"
        steps += yield from _walk(queue, f"lane:{lane}", start, wanted, limit, found)
        found.after = f"{found.after or _END}{_SEPARATOR}{lane}"
        if len(found.jobs) >= limit or steps >= MAX_STEPS:
            return
    found.after = ""


def _lanes(queue: str, wanted: JobFilter) -> Flow[list[str]]:
    names: set[str] = set()
    cursor = "0"
    for _ in range(MAX_LANE_PAGES):
        page: StatsPage = yield registry.stats_page(queue, cursor)
        names.update(page.lanes)
        cursor = page.cursor
        if cursor == "0":
            break
    return sorted(name for name in names if _is_wanted(name, wanted))


def _is_wanted(lane: str, wanted: JobFilter) -> bool:
    _, _, tenant, model = keys.split_lane(lane)
    return wanted.tenant in ("", tenant) and wanted.model in ("", model)


def _place(after: str, largest: int = _END) -> str:
    place = after or "0"
    if not (place.isascii() and place.isdigit() and len(place) <= 20 and int(place) <= largest):
        raise InvalidJob("after: use the value that the previous page returned")
    return place
