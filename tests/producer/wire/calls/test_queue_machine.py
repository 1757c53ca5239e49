"""A queue under random operations by several workers, checked against its invariants after each."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagemill.producer.wire.calls import (
    batches,
    dead_letters,
    limits,
    reads,
    registry,
    submissions,
    transitions,
)
from pagemill.producer.wire.calls.metering import quotas, usage
from pagemill.producer.wire.calls.metering.quotas import Quota
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.affinity import prompt_affinity
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES, JobStatus
from pagemill.producer.wire.schema.signing import split_payload
from tests.producer.driving import Queue, delta, open_queue, result_json
from tests.producer.queue_sets import check_sets

WORKERS = ("w1", "w2")
TERMINAL = set(END_STATES)
ROOMY = Quota(tokens_per_day=10**9, jobs_per_day=10**9)
EVEN = [str(number) for number in range(0, 400, 2)]


@dataclass(frozen=True)
class Link:
    """How a job waits: for which others, and if the last index is odd, for an even text of the first; if the
    sum is odd, it runs also if one of them failed."""

    indexes: list[int]

    def parents(self, jobs: list[str]) -> list[str]:
        return list(dict.fromkeys(jobs[index % len(jobs)] for index in self.indexes)) if jobs else []

    @property
    def is_picky(self) -> bool:
        return self.indexes[-1] % 2 == 1

    @property
    def is_lenient(self) -> bool:
        return sum(self.indexes) % 2 == 1

    def fields(self, parents: list[str]) -> dict[str, Any]:
        names = [f"p{place}" for place in range(len(parents))]
        fields: dict[str, Any] = {"after": dict(zip(names, parents, strict=True))}
        fields["prompt"] = "a" * 300 + "{p0.text}"
        if self.is_picky:
            fields["when"] = {"p0": {"text": EVEN}}
        if self.is_lenient:
            fields["on_parent_failure"] = "run"
        return fields

    def wants(self, place: int, state: str, text: str) -> bool:
        if self.is_picky and place == 0:
            return state == "succeeded" and text in EVEN
        return state == "succeeded" or self.is_lenient


class QueueMachine(RuleBasedStateMachine):
    """Jobs are submitted, workers call any transition, in any order, and with tokens that may be stale."""

    url: ClassVar[str] = ""
    held: Bundle[PulledJob] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue = open_queue(self.url, f"q-{uuid.uuid4().hex}")
        self.jobs: list[str] = []
        self.in_batch: set[str] = set()
        self.ended: dict[str, str] = {}
        self.committed: Counter[str] = Counter()
        self.results: dict[str, str] = {}
        self.purged: set[str] = set()
        """Dead, and discarded."""
        self.affinities: dict[str, str | None] = {}
        self.tenants: dict[str, str] = {}
        self.links: dict[str, Link] = {}
        self.parents: dict[str, list[str]] = {}
        self.ends: dict[str, tuple[str, str]] = {}
        """State and text of each finished job, even if its record no longer exists."""
        self.counted: dict[str, tuple[int, int]] = {}
        """For each finished job: the tokens of its prompt and of its output in the ledger."""
        self.told: dict[str, tuple[int, int]] = {}
        """For each job that a worker finished: the worker's report."""
        self.charges: dict[str, int] = {}
        """Jobs that were charged to their tenant's quota, and for how many tokens."""
        self.queue.run(quotas.set_quotas(self.queue.name, {"a": ROOMY}))
        self.forgotten: set[str] = set()
        """Dead, and no longer dead letters, but still their batch's."""

    @rule(
        priority=st.sampled_from(["high", "normal", "low"]),
        tenant=st.sampled_from(["a", "b"]),
        delay=st.sampled_from([None, 3600]),
        batch=st.booleans(),
        attempts=st.integers(1, 3),
        key=st.sampled_from([None, None, "k"]),
        waiter=st.sampled_from([None, "w1", "w2"]),
        dedupe=st.booleans(),
        prefix=st.sampled_from(["", "a" * 300, "b" * 300]),
        link=st.none() | st.builds(Link, st.lists(st.integers(0, 50), min_size=1, max_size=3)),
    )
    def submit(
        self,
        priority: str,
        tenant: str,
        delay: int | None,
        batch: bool,
        attempts: int,
        key: str | None,
        waiter: str | None,
        dedupe: bool,
        prefix: str,
        link: Link | None,
    ) -> None:
        job_id = f"j{len(self.jobs) + len(self.purged)}"
        fields = {"priority": priority, "tenant": tenant, "delay": delay, "max_attempts": attempts}
        fields |= {"temperature": 0.0, "dedupe": dedupe, "prompt": f"{prefix}hello"}
        parents = link.parents(self.jobs) if link is not None else []
        if link is not None and parents:
            fields |= link.fields(parents)
        if key is not None and not batch:
            fields["idempotency_key"] = key
        (status,) = self.queue.submit(job_id, batch_id="b" if batch else None, waiter=waiter, **fields)
        if status == "created":
            self.jobs.append(job_id)
            self.affinities[job_id] = prompt_affinity(fields["prompt"])
            self.tenants[job_id] = tenant
            if link is not None and parents:
                self.links[job_id] = link
                self.parents[job_id] = parents
            if batch:
                self.in_batch.add(job_id)
        else:
            is_foreign = any(self.tenants.get(parent) != tenant for parent in parents)
            assert status in ("same", "conflict", "full", *(["unknown"] if is_foreign else []))

    @rule(batch=st.booleans())
    def submit_without_memory(self, batch: bool) -> None:
        """The server's memory was found to be full."""
        seconds, microseconds = self.queue.client.time()
        meta, now = f"{self.queue.prefix}meta", 1000 * seconds + microseconds // 1000
        self.queue.client.hdel(meta, "memory_looked")
        self.queue.client.hset(meta, mapping={"memory_at": now, "memory_room": 0})
        assert self.queue.submit("refused", batch_id="b" if batch else None) in (["memory"], ["full"])
        self.queue.client.hdel(meta, "memory_at")
        assert self.queue.run(reads.statuses(self.queue.name, ["refused"])) == [None]

    @rule(index=st.integers(0, 50))
    def replay(self, index: int) -> None:
        """Run a job again, in state dead or not."""
        if self.jobs:
            old = self.jobs[index % len(self.jobs)]
            was_dead = self.queue.state(old) == "dead"
            job_id = f"j{len(self.jobs) + len(self.purged)}"
            job = Job.parse({"prompt": "hello", "model": "m"})
            item = submissions.prepare(job, job_id, replay_of=old)
            reply = self.queue.run(submissions.submit(self.queue.name, [item]))[0]
            assert (reply.status == "gone") == (not was_dead)
            if reply.status == "created":
                self.jobs.append(job_id)
                self.tenants[job_id] = "default"

    @rule(index=st.integers(0, 50))
    def purge(self, index: int) -> None:
        if self.jobs:
            job_id = self.jobs[index % len(self.jobs)]
            was_dead = self.queue.client.zscore(f"{self.queue.prefix}dead", job_id) is not None
            assert self.queue.run(dead_letters.purge(self.queue.name, [job_id])) == was_dead
            if was_dead and job_id not in self.in_batch:
                self.jobs.remove(job_id)
                self.purged.add(job_id)
                self.ended.pop(job_id, None)
            elif was_dead:
                self.forgotten.add(job_id)

    @rule(tenant=st.sampled_from(["a", "b"]), weight=st.integers(1, 3))
    def weigh(self, tenant: str, weight: int) -> None:
        self.queue.run(limits.set_weights(self.queue.name, {tenant: weight}))

    @rule(rate=st.sampled_from([None, 0.01, 1000.0]), jobs=st.sampled_from([None, 3]))
    def limit(self, rate: float | None, jobs: int | None) -> None:
        wanted = limits.QueueLimits(rate=rate, jobs=jobs)
        self.queue.run(limits.set_limits(self.queue.name, wanted))

    @rule(tokens=st.sampled_from([500, 10**9]), jobs=st.sampled_from([2, 10**9]))
    def set_quota(self, tokens: int, jobs: int) -> None:
        wanted = Quota(tokens_per_day=tokens, jobs_per_day=jobs)
        self.queue.run(quotas.set_quotas(self.queue.name, {"a": wanted}))

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.queue.run(registry.set_paused(self.queue.name, paused))

    @rule(index=st.integers(0, 50))
    def submit_again(self, index: int) -> None:
        if self.jobs:
            again = self.jobs[index % len(self.jobs)]
            assert self.queue.submit(again) == ["exists"]
            assert self.queue.submit(again, after=["nobody"]) == ["exists"]

    @rule(
        target=held, worker=st.sampled_from(WORKERS), cost=st.integers(0, 60), holding=st.integers(0, 1),
        count=st.integers(1, 3),
    )  # fmt: skip
    def pull(self, worker: str, cost: int, holding: int, count: int) -> object:
        jobs = self.queue.pull(count, worker=worker, cost=cost, holding=holding)
        assert len(jobs) <= count
        assert len({job.job_id for job in jobs}) == len(jobs)
        assert not any(job.alone for job in jobs) or len(jobs) == 1
        for job in jobs:
            self._check_outputs(job)
        return _multiple(jobs)

    @rule(jobs=st.lists(held, min_size=1, max_size=4))
    def commit(self, jobs: list[PulledJob]) -> None:
        calls = []
        for job in jobs:
            used, body = (
                JobUsage(2 * job.token + 5, 0, 3 * job.token, 0.001),
                result_json(job.job_id, str(job.token)),
            )
            calls.append(
                transitions.commit(self.queue.name, job.job_id, job.token, "succeeded", body, used=used)
            )
        for job, reply in zip(jobs, self.queue.transport.run_many(calls), strict=True):
            self._check_commit(job, reply)

    def _check_commit(self, job: PulledJob, reply: str) -> None:
        text, used = str(job.token), (2 * job.token + 5, 3 * job.token)
        if reply not in ("already_done", "fenced"):
            self.told[job.job_id] = used
        if reply == "committed":
            self.committed[job.job_id] += 1
            self.results[job.job_id] = text
        if reply == "already_done" and self.queue.state(job.job_id) == "succeeded":
            assert self.results[job.job_id] == text

    @rule(job=held)
    def retry(self, job: PulledJob) -> None:
        used = (2 * job.token + 3, job.token)
        reply = self.queue.retry(job, 60, used=JobUsage(used[0], 0, used[1], 0.001))
        if reply not in ("already_done", "fenced", "retrying"):
            self.told[job.job_id] = used

    @rule(job=held)
    def release(self, job: PulledJob) -> None:
        self.queue.release(job)

    @rule(job=held, offset=st.integers(0, 3), restart=st.booleans())
    def checkpoint(self, job: PulledJob, offset: int, restart: bool) -> None:
        self.queue.checkpoint(job, delta(offset, 7), restart=restart)

    @rule(job=held, worker=st.sampled_from(WORKERS))
    def renew(self, job: PulledJob, worker: str) -> None:
        self.queue.run(transitions.renew(self.queue.name, worker, [(job.job_id, job.token)]))

    @rule(index=st.integers(0, 50))
    def cancel(self, index: int) -> None:
        if self.jobs:
            self.queue.cancel(self.jobs[index % len(self.jobs)])

    @rule(index=st.integers(0, 50), waiter=st.sampled_from(["w1", "w2"]))
    def hang_up(self, index: int, waiter: str) -> None:
        if self.jobs:
            self.queue.hang_up(waiter, self.jobs[index % len(self.jobs)])

    @rule(index=st.integers(0, 50), kind=st.sampled_from(["leases", "delayed", "deadlines"]))
    def pass_time(self, index: int, kind: str) -> None:
        """Let one lease, one delay or one deadline expire."""
        if self.jobs:
            job_id = self.jobs[index % len(self.jobs)]
            if kind == "delayed" and self.queue.status(job_id).waits_for:
                return  # no clock reaches its time
            is_deadline = kind == "deadlines" and self.queue.state(job_id) in ACTIVE_STATES
            if is_deadline:
                self.queue.client.hset(f"{self.queue.prefix}job:{job_id}", "deadline", 1)
            self.queue.client.zadd(f"{self.queue.prefix}{kind}", {job_id: 1}, xx=not is_deadline)
            self.queue.sweep()

    @invariant()
    def every_state_is_told_the_same_everywhere(self) -> None:
        statuses = self.queue.run(reads.statuses(self.queue.name, self.jobs)) if self.jobs else []
        states = {status.id: status.state for status in statuses if status is not None}
        assert set(states) == set(self.jobs), "a job was lost"
        for job_id, state in self.ended.items():
            assert states[job_id] == state, "a terminal state changed"
        self.ended = {job_id: state for job_id, state in states.items() if state in TERMINAL}
        self._check_counts(states)
        self._check_sets(states)
        found = {status.id: status for status in statuses if status is not None}
        self._check_ledger(found)
        self._check_links(found)
        for job_id in (job_id for job_id, state in states.items() if state == "succeeded"):
            result = self.queue.run(reads.outcome(self.queue.name, job_id)).result
            assert result is not None
            ran = result.copied_from or job_id
            assert (result.id, result.text, self.committed[ran]) == (job_id, self.results[ran], 1)

    def _check_outputs(self, job: PulledJob) -> None:
        """A job receives its parents' outputs once."""
        link = self.links.get(job.job_id)
        outputs = [json.loads(line) for line in split_payload(job.payload).outputs]
        expected = [self.ends[parent] for parent in self.parents[job.job_id]] if link is not None else []
        found = [(output["state"], output.get("text", "")) for output in outputs]
        assert sorted(found) == sorted(expected)
        for parent, (state, text) in zip(self.parents.get(job.job_id, ()), expected, strict=True):
            assert link is not None
            assert link.wants(self.parents[job.job_id].index(parent), state, text)

    def _check_links(self, found: dict[str, JobStatus]) -> None:
        for job_id in found.keys() & self.ended.keys() - self.ends.keys():
            self.ends[job_id] = found[job_id].state, ""
            if found[job_id].state == "succeeded":
                result = self.queue.run(reads.outcome(self.queue.name, job_id)).result
                assert result is not None
                self.ends[job_id] = "succeeded", result.text
        waiting: dict[str, set[str]] = {}
        for job_id in found.keys() & self.links.keys():
            status, parents, link = found[job_id], self.parents[job_id], self.links[job_id]
            ends = {place: self.ends[one] for place, one in enumerate(parents) if one in self.ends}
            is_wanted = all(link.wants(place, *end) for place, end in ends.items())
            assert is_wanted or status.state in TERMINAL
            if status.state not in TERMINAL:
                assert status.waits_for == tuple(one for one in parents if one not in self.ends)
            for parent in status.waits_for if status.state not in TERMINAL else ():
                waiting.setdefault(parent, set()).add(job_id)
        prefix, client = self.queue.prefix, self.queue.client
        names = [name for name in self.queue.names() if name.startswith("children:")]
        children = {
            name[9:]: {one.decode() for one in client.zrange(f"{prefix}{name}", 0, -1)} for name in names
        }
        assert children == waiting
        assert {one.decode() for one in client.zrange(f"{prefix}awaited", 0, -1)} == waiting.keys()

    def _check_ledger(self, found: dict[str, JobStatus]) -> None:
        """It has the outcomes, each once: the worker's report, or otherwise the job's status."""
        for job_id in self.ended.keys() - self.counted.keys():
            progress, is_follower = found[job_id].progress, self._follows(job_id)
            shown = (progress.prompt_tokens_done, progress.generated_tokens) if progress else (0, 0)
            self.counted[job_id] = (0, 0) if is_follower else self.told.get(job_id, shown)
        jobs: Counter[str] = Counter(self.tenants[job_id] for job_id in self.counted)
        tokens: Counter[tuple[str, int]] = Counter()
        for job_id, used in self.counted.items():
            for place in (0, 1):
                tokens[self.tenants[job_id], place] += used[place]
        days = self.queue.run(usage.days(self.queue.name))
        rows = [row for day in days for row in self.queue.run(usage.rows(self.queue.name, day))]
        assert sum(row.jobs for row in rows) == jobs.total()
        for tenant in set(self.tenants.values()):
            own = [row for row in rows if row.tenant == tenant]
            assert sum(row.jobs for row in own) == jobs[tenant]
            assert sum(row.prompt_tokens for row in own) == tokens[tenant, 0]
            assert sum(row.completion_tokens for row in own) == tokens[tenant, 1]
        assert round(sum(row.device_s for row in rows), 6) == round(0.001 * len(self.told), 6)
        self._check_spent()

    def _check_spent(self) -> None:
        """A tenant has spent the usage of its finished jobs, and the costs of its started, unfinished jobs."""
        for job_id in self.jobs:
            charged = self.queue.client.hget(f"{self.queue.prefix}job:{job_id}", "charged")
            if charged is not None:
                assert self.tenants[job_id] == "a", "another tenant has no quota"
                self.charges[job_id] = int(charged.split()[0])
        spent = sum(
            sum(self.counted[job_id]) if job_id in self.counted else cost
            for job_id, cost in self.charges.items()
        )
        left = self.queue.run(quotas.remaining(self.queue.name, ["a"]))["a"]
        assert left.jobs_per_day is not None
        assert left.tokens_per_day is not None
        assert left.jobs_per_day.remaining == max(0, left.jobs_per_day.limit - len(self.charges))
        assert left.tokens_per_day.remaining == max(0, left.tokens_per_day.limit - spent)

    def _follows(self, job_id: str) -> bool:
        return bool(self.queue.client.hexists(f"{self.queue.prefix}job:{job_id}", "leader"))

    def _check_counts(self, states: dict[str, str]) -> None:
        counts = registry.stats(self.queue.run, self.queue.name).counts
        ever = Counter(states.values()) + Counter({"dead": len(self.purged)})
        assert {s: n for s, n in counts.items() if n} == dict(ever)
        batch = self.queue.run(batches.counts(self.queue.name, "b"))
        if batch is not None:
            by_state = batch.model_dump(exclude={"total"})
            assert {s: n for s, n in by_state.items() if n} == dict(
                Counter(states[job_id] for job_id in self.in_batch)
            )
            assert sum(by_state.values()) == batch.total == len(self.in_batch)

    def _check_sets(self, states: dict[str, str]) -> None:
        check_sets(self.queue, states, self.affinities)
        letters = {job_id for job_id, state in states.items() if state == "dead"} - self.forgotten
        found = self.queue.client.zrange(f"{self.queue.prefix}dead", 0, -1)
        assert {member.decode() for member in found} == letters

    def teardown(self) -> None:
        """All jobs can be finished, and then no data is held."""
        for job_id in self.jobs:
            self.queue.cancel(job_id)
            self.queue.lapse(job_id)
        for _ in range(3):
            self.queue.sweep()
        for job_id in self.jobs:
            self.queue.cancel(job_id)  # a finished primary job's duplicate may have replaced it
        for job_id in self.jobs:
            assert self.queue.state(job_id) in TERMINAL
        kinds = {name.split(":")[0] for name in self.queue.names()}
        assert kinds <= {
            "job", "in", "out", "ckpt", "idem", "meta", "counts", "dead", "bell",
            "batch", "bjobs", "bfeed", "bexpiry", "history", "weights", "puller", "end", "sharers",
            "usage", "quotas", "spent", "parked", "bowner", "large",
            "started", "spells", "over",
        }  # fmt: skip
        for name in self.queue.names():
            if name.startswith("end:"):
                is_counted = self.queue.client.exists(f"{self.queue.prefix}sharers:{name[4:]}")
                assert is_counted or self.queue.client.pttl(f"{self.queue.prefix}{name}") > 0
        for name in self.queue.names():
            if name.startswith(("puller:", "started:", "spells:", "over:")):
                assert self.queue.client.pttl(f"{self.queue.prefix}{name}") > 0
        for job_id in set(self.jobs) - self.in_batch:
            assert self.queue.client.pttl(f"{self.queue.prefix}job:{job_id}") > 0
        self.queue.client.delete(*(f"{self.queue.prefix}{name}" for name in self.queue.names()), "none")
        self.queue.transport.close()


def _multiple(jobs: list[PulledJob]) -> object:
    from hypothesis.stateful import multiple

    return multiple(*jobs)


def run_machine(url: str, examples: int, steps: int) -> None:
    machine = type("BoundQueueMachine", (QueueMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_invariants_hold_in_short(valkey_url: str) -> None:
    run_machine(valkey_url, examples=5, steps=20)


@pytest.mark.slow
def test_the_invariants_hold(redis_url: str) -> None:
    run_machine(redis_url, examples=25, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_invariants_hold_for_long(valkey_url: str) -> None:
    run_machine(valkey_url, examples=150, steps=60)
