"""Removal of a tenant from a queue, as a flow (see effects.py).

    fence     new data of the tenant is rejected; the fence expires a minute after the last step
    look      a walk through the keyspace names its jobs, batches and files
    jobs      batch by batch, then the others; running jobs are asked to end and waited for
    rest      files, names, places in sets, files of the store, and the data of erasers
    prove     another walk through all names and contents (proof.py)

A step removes all data of the jobs or names that it lists, so a killed purge can be run again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagemill.producer.client.effects import Delete, Emit, Flow, Sleep
from pagemill.producer.client.purge.erasers import ERASERS
from pagemill.producer.client.purge.names import (
    PER_BATCH,
    id_of_key,
    job_of_file,
    tenant_of_key,
    tenant_of_lane,
)
from pagemill.producer.client.purge.proof import Proof
from pagemill.producer.client.purge.report import Phase, PurgeOptions, PurgeProgress, PurgeReport
from pagemill.producer.wire.calls import purge, stored
from pagemill.producer.wire.calls.purge import BatchOwners, Content, Key, KeyPage, Place, Removed
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob

FENCE_MS = 60_000
FENCE_EVERY_S = 10.0
JOBS_AT_ONCE = 32
NAMES_AT_ONCE = 250
POLL_S = 0.2
MAX_WALKS = 20
"""Maximum number of walks for jobs: a client that ignores the fence, such as a third party's, may still submit."""


@dataclass(slots=True)
class _Found:
    """The tenant's data that walks have found so far."""

    states: dict[str, str] = field(default_factory=dict)
    """The state in which each job was first seen."""
    present: set[str] = field(default_factory=set)
    """Jobs that are known to still exist."""
    running: set[str] = field(default_factory=set)
    """Jobs that were asked to end."""
    batches: set[str] = field(default_factory=set)
    """Batches with jobs that still exist."""
    all_batches: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    """Batches that were removed as a whole."""
    files: set[str] = field(default_factory=set)
    api_batches: set[str] = field(default_factory=set)

    @property
    def ids(self) -> set[str]:
        """Return the ids that must no longer be found, in addition to the tenant's name."""
        return self.states.keys() | self.dropped | self.files | self.api_batches

    def note(self, key: Key, tenant: str) -> None:
        if key.owner == "ours" and key.kind == "job":
            state, batch = key.values
            self.states.setdefault(key.rest, state)
            self.present.add(key.rest)
            if batch:
                self.batches.add(batch)
        elif key.owner == "ours" and key.kind == "abatch":
            self.api_batches.add(key.rest)
        elif key.kind == "bowner" and key.values == (tenant,):
            self.batches.add(key.rest)
        self.all_batches |= self.batches


def purge_tenant(queue: str, tenant: str, options: PurgeOptions, *, has_store: bool) -> Flow[None]:
    """Remove a tenant; emits PurgeProgress, and finally a PurgeReport. Raises InvalidJob for invalid options."""
    keys.check_name(keys.TENANT_PATTERN, keys.TENANT_RULE, tenant)
    if unknown := options.also - {eraser.name for eraser in ERASERS}:
        raise InvalidJob(f"nothing that can be removed is called {', '.join(sorted(unknown))}")
    run = _Purge(queue, tenant, options, has_store)
    yield from run.count() if options.dry_run else run.run()


class _Purge:
    def __init__(self, queue: str, tenant: str, options: PurgeOptions, has_store: bool) -> None:
        self._queue = queue
        self._tenant = tenant
        self._options = options
        self._has_store = has_store
        self._found = _Found()
        self._report = PurgeReport(queue, tenant, dry_run=options.dry_run)
        self._fenced_at = -FENCE_EVERY_S
        self._places: list[tuple[Place, str]] = []
        self._give_up_at = time.monotonic() + options.wait_s

    def count(self) -> Flow[None]:
        """Count the tenant's data."""
        yield from self._walk(self._note)
        names = yield from self._items(f"files:{self._tenant}")
        self._found.files.update(names[::2])
        self._update_report()
        yield Emit(self._report)

    def run(self) -> Flow[None]:
        for _ in range(MAX_WALKS):
            # Before their jobs, so that the gateway that runs such a batch submits no more of them.
            yield from self._remove_files()
            yield from self._walk(self._note)
            if not self._found.present and not self._found.batches:
                break
            while (yield from self._remove_jobs()):
                yield from self._step("wait", len(self._found.running))
                yield Sleep(POLL_S)
        yield from self._remove_names()
        yield from self._remove_stored()
        for eraser in ERASERS:
            if eraser.name in self._options.also:
                self._report.erased[eraser.name] = yield from eraser.erase(self._queue, self._tenant)
        yield from self._prove()
        yield purge.fence(self._queue, self._tenant, 0)
        self._update_report()
        yield Emit(self._report)

    def _update_report(self) -> None:
        found, report = self._found, self._report
        report.jobs = dict(sorted(Counter(found.states.values()).items()))
        report.batches = len(found.all_batches)
        report.files, report.api_batches = len(found.files), len(found.api_batches)

    def _step(self, phase: Phase, done: int, total: int = 0) -> Flow[None]:
        """Report the progress, and keep the fence up."""
        now = time.monotonic()
        if not self._options.dry_run and now >= self._fenced_at + FENCE_EVERY_S:
            yield purge.fence(self._queue, self._tenant, FENCE_MS)
            self._fenced_at = now
        yield Emit(PurgeProgress(phase, done, total))

    def _walk(
        self, on_key: Callable[[Key], Flow[None]], phase: Phase = "look", *, others: bool = False
    ) -> Flow[int]:
        """Pass every key of the queue to `on_key`; returns their number. Some may be passed twice."""
        cursor, looked = "0", 0
        while True:
            yield from self._step(phase, looked)
            page: KeyPage = yield purge.scan(self._queue, cursor, self._tenant, others=others)
            for key in page.keys:
                yield from on_key(key)
            cursor, looked = page.cursor, looked + len(page.keys)
            if cursor == "0":
                return looked

    def _items(self, name: str) -> Flow[list[str]]:
        """Return all items of a key."""
        items: list[str] = []
        place = ""
        while True:
            content: Content = yield purge.read(self._queue, name, place)
            items += [item.decode(errors="replace") for item in content.items]
            place = content.place
            if not place:
                return items

    def _note(self, key: Key) -> Flow[None]:
        yield from ()
        self._found.note(key, self._tenant)

    def _remove_files(self) -> Flow[None]:
        while True:
            yield from self._step("rest", len(self._found.files))
            batches, file_id = yield purge.files(self._queue, self._tenant)
            self._found.api_batches.update(batches)
            if not batches and not file_id:
                return
            if file_id:
                self._found.files.add(file_id)

    @property
    def _by_force(self) -> bool:
        return time.monotonic() >= self._give_up_at

    def _remove_jobs(self) -> Flow[bool]:
        """Remove the jobs that the walk found; returns whether some are running, and must be waited for."""
        self._found.running.clear()
        for batch_id in sorted(self._found.batches):
            yield from self._remove_batch(batch_id)
        single = sorted(self._found.present - self._found.running)
        for start in range(0, len(single), JOBS_AT_ONCE):
            yield from self._remove_some(single[start : start + JOBS_AT_ONCE])
        return bool(self._found.running)

    def _remove_batch(self, batch_id: str) -> Flow[None]:
        found = self._found
        whole = yield from self._is_whole(batch_id)
        place, is_running = 0, False
        while True:
            yield from self._step("jobs", self._num_gone, len(found.states))
            by_force = self._by_force
            removed: Removed = yield purge.batch_jobs(
                self._queue, self._tenant, batch_id, place, whole=whole, by_force=by_force
            )
            self._count_removed(removed, by_force)
            is_running = is_running or bool(removed.running)
            if not removed.left:
                place += removed.looked
            if not removed.looked:
                break
        if whole:
            if not is_running and (yield purge.drop_batch(self._queue, batch_id)):
                found.dropped.add(batch_id)
                found.batches.discard(batch_id)
        else:
            yield from self._empty_feed(batch_id)
            if not is_running:
                found.batches.discard(batch_id)

    def _is_whole(self, batch_id: str) -> Flow[bool]:
        """Return whether all jobs of a batch with a record are the tenant's."""
        place = 0
        while True:
            owners: BatchOwners = yield purge.batch_owners(self._queue, batch_id, place)
            if owners.recorded:
                return owners.recorded == self._tenant
            if set(owners.tenants) - {self._tenant}:
                return False
            place += owners.looked
            if not owners.looked:
                return True

    def _empty_feed(self, batch_id: str) -> Flow[None]:
        place = 0
        while True:
            looked: int = yield purge.batch_feed(self._queue, batch_id, place)
            place += looked
            if not looked:
                return

    def _remove_some(self, job_ids: Sequence[str]) -> Flow[None]:
        asked = set(job_ids)
        while job_ids:
            yield from self._step("jobs", self._num_gone, len(self._found.states))
            by_force = self._by_force
            removed: Removed = yield purge.jobs(self._queue, self._tenant, job_ids, by_force=by_force)
            self._count_removed(removed, by_force)
            job_ids = removed.left
        # The others were already removed.
        self._found.present -= asked - self._found.running

    @property
    def _num_gone(self) -> int:
        return len(self._found.states) - len(self._found.present)

    def _count_removed(self, removed: Removed, by_force: bool) -> None:
        found = self._found
        for job_id in removed.gone:
            found.states.setdefault(job_id, "queued")  # not found by a walk: a duplicate
        if by_force:
            self._report.forced += sum(found.states[job_id] == "running" for job_id in removed.gone)
        found.present.difference_update(removed.gone)
        found.running.update(removed.running)

    def _remove_names(self) -> Flow[None]:
        """Remove keys, lanes and places that remain under the tenant's name, or under an id."""
        self._places = [("parked", "")]
        yield from self._walk(self._note_name, "rest")
        for name in ("lanes", "overtaken"):
            items = yield from self._items(name)
            self._places += [("lane", item) for item in items if tenant_of_lane(item) == self._tenant]
        for start in range(0, len(self._places), NAMES_AT_ONCE):
            yield from self._step("rest", start, len(self._places))
            yield purge.places(self._queue, self._tenant, self._places[start : start + NAMES_AT_ONCE])

    def _note_name(self, key: Key) -> Flow[None]:
        yield from ()
        found = self._found
        if key.kind == "turns":
            self._places.append(("turn", key.rest))
        elif key.kind == "started":
            self._places.append(("started", key.rest))
        elif key.kind in PER_BATCH:
            if key.rest in found.dropped:
                self._places.append(("key", key.name))
        elif key.kind in ("wait", "job"):
            return  # of a newer job: without its lane it would never run
        elif tenant_of_key(key.kind, key.rest) == self._tenant or (
            key.owner in ("orphan", "other") and id_of_key(key.kind, key.rest) in found.ids
        ):
            self._places.append(("key", key.name))

    def _remove_stored(self) -> Flow[None]:
        """Delete the jobs' files. Without a store here, a worker does; until then the proof finds their names."""
        uris = yield from self._items("stored")
        wanted = [uri for uri in uris if job_of_file(uri) in self._found.states]
        for start in range(0, len(wanted) if self._has_store else 0, JOBS_AT_ONCE):
            part = wanted[start : start + JOBS_AT_ONCE]
            yield from self._step("rest", start, len(wanted))
            yield Delete(part)
            yield stored.forget(self._queue, part)
            self._report.stored_files += len(part)

    def _prove(self) -> Flow[None]:
        kept = [eraser for eraser in ERASERS if eraser.name not in self._options.also]
        self._report.kept = [eraser.name for eraser in kept]
        kinds = frozenset(kind for eraser in kept for kind in eraser.kinds)
        proof = Proof(self._queue, self._tenant, self._found.ids, kinds)
        self._report.keys_looked_at = yield from self._walk(proof.judge, "prove", others=True)
        yield from proof.judge_files()
        self._report.remains = proof.leftovers
