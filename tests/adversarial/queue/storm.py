"""A storm over one queue: thousands of random steps, and at its end a check of all guarantees."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from pagemill.producer.wire.calls import batches, limits, registry, transitions
from pagemill.producer.wire.calls.metering import usage
from tests.adversarial.queue.ledger import BATCH_MS, DAY_MS, NOTICE_MS
from tests.adversarial.queue.operators import Operators
from tests.adversarial.queue.parties import BACKLOG, MAX_BYTES, MODELS, START_S, USED, names_of
from tests.producer.driving import DECODE, PLENTY
from tests.producer.queue_sets import check_sets

STAYS = re.compile(r"meta|counts|weights|turns:.*|usage(:.*)?")
"""The keys that an idle queue keeps permanently or for a year: totals, settings, the turns of tenants, the ledger."""
OF_JOBS = re.compile(r"(job|in|out|ckpt|md|history):(.*)")
OF_BATCHES = re.compile(r"(batch|bjobs|bfeed|backed|bowner):(.*)")
FOR_A_TIME = re.compile(r"(workers|dead|bexpiry|(end|sharers):.*)")
"""Sweep removes their members; an outcome is removed with the last batch whose jobs share it."""
LEDGER_S = 390 * 86_400
"""The ledger keeps a day for 400 days."""
MEGABYTE = 1 << 20
MAX_COMMANDS = {"batch_cancel": 12_000, "submit": 6_000}
MAX_COMMANDS_ELSE = 5_000
"""The maximum of any script: 128 outcomes, or 256 duplicates that get another primary job, cost a few thousand."""
MAX_REPLY = 4 * MEGABYTE + 2 * MAX_BYTES + 2 * MEGABYTE
"""The size limit of a reply, and one job more: its payload, its checkpoint, its result or error."""


class Storm(Operators):
    def run(self, jobs: int) -> None:
        """Jobs to create before the queue rests."""
        while len(self.ledger.jobs) < jobs:
            self.step()
            if self.meter.calls % 500 < 2:
                self.check_all()
        self.rest()

    def step(self) -> None:
        backlog = len(self.ledger.active)
        room = 1.0 if backlog < BACKLOG else 0.03
        actions: list[tuple[float, Callable[[], None]]] = [
            (10 * room, self.submit), (0.3 * room, self.submit_equal), (18, self.pull), (30, self.finish),
            (6, self.checkpoint), (3, self.renew), (3, self.cancel), (3, self.sweep), (4, self.read_job),
            (5, self.read_feed), (1.5, self.acknowledge), (0.1, self.cancel_batch), (1.5, self.letters),
            (5, self.tell), (1, self.switch), (1, self.look), (4, self.jump), (3, self.announce), (1, self.set_quota),
            (1, self.roll_out), (0.2, self.squeeze),
        ]  # fmt: skip
        weights, names = zip(*actions, strict=True)
        self.rng.choices(names, weights)[0]()

    def check_all(self) -> None:
        """Every job's state, and every set that contains it."""
        ids = [job_id for job_id, job in self.ledger.jobs.items() if not job.is_freed]
        self.observe(ids)
        states = {job_id: self.ledger.jobs[job_id].state for job_id in self.ledger.active}
        check_sets(self.queue, states, {job_id: job.affinity for job_id, job in self.ledger.jobs.items()})
        self.look()

    def rest(self) -> None:
        """Let all jobs finish, and read all outcomes; then search for lost, doubled or remaining data."""
        self.send(registry.set_paused(self.queue.name, False))
        self.send(limits.set_limits(self.queue.name, limits.QueueLimits()))
        self.clear_quotas()
        for model in MODELS:
            self.finish_rollout(model)
        for _ in range(1000):
            if not self.ledger.active:
                break
            self._run_what_waits()
        self.check_all()
        assert not self.ledger.active, f"they do not end: {sorted(self.ledger.active)[:10]}"
        assert not any("rollout" in name or name.startswith("canary:") for name in self.queue.names())
        self.tell_all()
        self._read_all()
        self._check_totals()
        self._check_lifetimes()
        self._check_costs()
        if self.clock is not None:
            self._let_all_expire()

    def _run_what_waits(self) -> None:
        jobs = []
        for revision in ("r1", "r2"):
            names = names_of(MODELS, revision)
            call = transitions.pull(self.queue.name, f"last-{revision}", names, 64, PLENTY**3, 600_000)
            jobs += self.send(call).jobs
        for pulled in jobs:
            until_ms = self.asked_before_ms + 600_000
            self.observe(list(self.ledger.jobs[pulled.job_id].parents))
            self.ledger.pulled(pulled.job_id, pulled.token, pulled.payload, pulled.entries, until_ms)
            self.commit(self.ledger.jobs[pulled.job_id], pulled.token)
        self.sweep()
        if self.clock is not None and not self.queue.client.exists(f"{self.queue.prefix}lanes"):
            self.clock_s += 3600
            self.clock.stop_at(self.clock_s)
        elif self.clock is None:
            time.sleep(0.02)
        self.observe(sorted(self.ledger.active))

    def _read_all(self) -> None:
        """Every batch's feed to its end."""
        for batch, ids in self.ledger.batches.items():
            start = -1
            while start < (start := max(self.feeds.setdefault(batch, {}), default=0)):
                self.read_feed_from(batch, start)
            unread = [i for i in ids if not (self.ledger.jobs[i].is_fed or self.ledger.jobs[i].is_freed)]
            kept = [
                i for i in unread if self.ledger.latest_ms < self.ledger.jobs[i].finished_at_ms + BATCH_MS
            ]
            assert not kept, f"the ends of {kept[:10]} are not in the feed of {batch}"

    def _check_totals(self) -> None:
        stats = registry.stats(self.send, self.queue.name)
        assert {state: number for state, number in stats.counts.items() if number} == self.ledger.counts()
        assert (stats.leases, stats.waiting, stats.followers) == (0, {}, 0)
        for batch, ids in self.ledger.batches.items():
            counts = self.send(batches.counts(self.queue.name, batch))
            if counts is not None:
                found = counts.model_dump(exclude={"total"})
                assert {state: number for state, number in found.items() if number} == self.ledger.counts(ids)
        days = self.send(usage.days(self.queue.name))
        rows = [row for day in days for row in self.send(usage.rows(self.queue.name, day))]
        if self.clock_s - START_S < LEDGER_S:
            for tenant in {job.tenant for job in self.ledger.jobs.values()}:
                counted = sum(row.jobs for row in rows if row.tenant == tenant)
                ran = [job for job in self.ledger.jobs.values() if job.tenant == tenant]
                assert counted == sum(not job.is_invalid for job in ran)
                tokens = sum(row.completion_tokens for row in rows if row.tenant == tenant)
                metered = USED.completion_tokens * sum(job.is_metered for job in ran)
                assert (
                    metered
                    <= tokens
                    <= metered + DECODE.generated_tokens * sum(not job.is_metered for job in ran)
                )
        assert {row.model for row in rows} <= set(MODELS), "a revision is no model"
        for job in self.ledger.jobs.values():
            is_late = self.ledger.latest_ms >= job.finished_at_ms + NOTICE_MS
            assert is_late or job.told == job.boxes, f"nobody was told the end of {job.id}"

    def _check_lifetimes(self) -> None:
        """Every key is the queue's own, or belongs to a finished job or batch and expires."""
        names = sorted(self.queue.names())
        with self.queue.client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.pttl(f"{self.queue.prefix}{name}")
            lives = dict(zip(names, pipeline.execute(), strict=True))
        expiring = self.queue.client.zrange(f"{self.queue.prefix}bexpiry", 0, -1)
        kept = {batch.decode() for batch in expiring}
        for name, ttl_ms in lives.items():
            of_job, of_batch = OF_JOBS.fullmatch(name), OF_BATCHES.fullmatch(name)
            is_kept = bool(of_job and self.ledger.jobs[of_job[2]].batch in kept) or bool(
                of_batch and of_batch[2] in kept
            )
            is_fine = ttl_ms != -1 or is_kept or STAYS.fullmatch(name) or FOR_A_TIME.fullmatch(name)
            assert is_fine, f"{name} stays for ever"

    def _check_costs(self) -> None:
        for script, commands in self.meter.max_commands.items():
            assert commands <= MAX_COMMANDS.get(script, MAX_COMMANDS_ELSE), self.meter.report()
        for script, size in self.meter.max_bytes.items():
            assert size <= MAX_REPLY, f"{script} answered {size} bytes\n{self.meter.report()}"

    def _let_all_expire(self) -> None:
        """Two weeks later no data of any job remains."""
        assert self.clock is not None
        self.clock_s += 16 * DAY_MS // 1000
        self.clock.stop_at(self.clock_s)
        for _ in range(5 + len(self.ledger.jobs) // 64 + 3 * len(self.ledger.batches)):
            self.sweep()
        left = sorted(name for name in self.queue.names() if not STAYS.fullmatch(name))
        assert not left, f"{len(left)} keys are left: {left[:20]}"
