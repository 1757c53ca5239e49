"""The other half of a storm: cancels, reads, acknowledgments, notifications, and the passage of time."""

from __future__ import annotations

from pagemill.producer.wire.calls import (
    batches,
    dead_letters,
    limits,
    outbox,
    reads,
    registry,
    submissions,
    transitions,
)
from pagemill.producer.wire.calls.submissions import Submission
from tests.adversarial.queue.ledger import BATCH_MS, DAY_MS
from tests.adversarial.queue.parties import RELAYS, TENANTS, Parties, write_header

HOURS_S = 3600


class Readers(Parties):
    """Operations on a queue from the outside."""

    def cancel(self) -> None:
        ids = self.pick(most=self.rng.choice([1, 1, 5])) + self.pick(self.ledger.jobs, 1)
        ids = list(dict.fromkeys(ids))
        self._ask_to_cancel(ids)
        words, again = self.send_twice(transitions.cancel(self.queue.name, ids))
        follow_up = {"cancelled": "done", "requested": "requested", "done": "done", "missing": "missing"}
        assert again is None or again == [follow_up[word] for word in words]
        self.observe([job_id for job_id, word in zip(ids, words, strict=True) if word != "missing"])

    def _ask_to_cancel(self, ids: list[str]) -> None:
        for job_id in ids:
            self.ledger.jobs[job_id].is_cancelled = True

    def cancel_batch(self) -> None:
        """A part of a response, as with a client that disconnects in the middle."""
        if self.ledger.batches:
            batch = self.rng.choice(sorted(self.ledger.batches))
            start = self.rng.randint(0, len(self.ledger.batches[batch]))
            self._ask_to_cancel(self.ledger.batches[batch][start : start + batches.PAGE_JOBS])
            self.send(batches.cancel(self.queue.name, batch, start))

    def sweep(self) -> None:
        self.send(transitions.sweep(self.queue.name))

    def read_job(self) -> None:
        """A result contains the committed data, and stays the same."""
        (job_id,) = self.pick(self.ledger.jobs, 1) or [""]
        if job_id:
            self.observe([job_id])
            self.check_outcome(job_id)
            self.send(reads.statuses(self.queue.name, self.pick(self.ledger.jobs, 20)))
            self.send(reads.feed(self.queue.name, job_id, 0, 0))

    def check_outcome(self, job_id: str) -> None:
        job = self.ledger.jobs[job_id]
        outcome = self.send(reads.outcome(self.queue.name, job_id))
        if job.state == "succeeded" and outcome.state is not None:
            assert outcome.state == "succeeded"
            assert outcome.result is not None, f"the result of {job_id} is gone, and its record is not"
            ran = self.ledger.jobs[outcome.result.copied_from or job_id]
            assert ran.text, f"{job_id} has the result of {ran.id}, which committed none"
            assert outcome.result.text.startswith(ran.text), f"{job_id} has another's result"

    def read_feed(self) -> None:
        """A page from the reader's position, or again from the middle: it has the same content."""
        if not self.ledger.batches:
            return
        batch = self.rng.choice(sorted(self.ledger.batches))
        seen = self.feeds.setdefault(batch, {})
        start = self.rng.choice([max(seen, default=0), self.rng.randint(0, max(seen, default=0))])
        self.read_feed_from(batch, start)

    def read_feed_from(self, batch: str, start: int) -> None:
        seen = self.feeds[batch]
        page = self.send(batches.page(self.queue.name, batch, start, ordered=False))
        self.observe([item.id for item in page.items])
        for item in page.items:
            position = int(item.cursor[1:])
            if position in seen:
                assert seen[position] == item.id, f"{batch}: position {position} of the feed changed"
            else:
                self.ledger.fed(item.id)
                seen[position] = item.id
            assert item.state == self.ledger.jobs[item.id].state

    def acknowledge(self) -> None:
        """Up to the reader's position; some in the order of the submits."""
        if not self.feeds:
            return
        batch = self.rng.choice(sorted(self.feeds))
        if self.rng.random() < 0.3:
            self._acknowledge_in_order(batch)
            return
        position = self.rng.randint(0, max(self.feeds[batch], default=0))
        call = batches.ack(self.queue.name, batch, f"e{position}", 0)
        (_, reached), again = self.send_twice(call)
        assert again is None or (again[0] == 0) or reached < position
        for at, job_id in self.feeds[batch].items():
            if at <= reached:
                self.ledger.jobs[job_id].is_freed = True
        if again is not None:
            for at, job_id in self.feeds[batch].items():
                if at <= again[1]:
                    self.ledger.jobs[job_id].is_freed = True

    def _acknowledge_in_order(self, batch: str) -> None:
        """Each job that has finished; nothing changes for the others."""
        ids = self.ledger.batches[batch][:50]
        self.observe(ids)
        self.send(batches.ack(self.queue.name, batch, f"s{len(ids)}", 0))
        freed = [self.ledger.jobs[job_id] for job_id in ids if self.ledger.jobs[job_id].has_ended]
        for job in freed:
            job.is_freed = True
        # Their ids stay known to the batch, as long as it exists.
        fresh = [job.id for job in freed if self.ledger.latest_ms < job.finished_at_ms + BATCH_MS]
        self.submit_known(fresh[-3:], batch)

    def letters(self) -> None:
        """Read, purge, replay."""
        page = self.send(dead_letters.page(self.queue.name, 0))
        self.observe([letter.id for letter in page.letters])
        for letter in page.letters:
            job = self.ledger.jobs[letter.id]
            assert job.state == "dead"
            assert not job.is_purged
        dead = [letter.id for letter in page.letters]
        for opened in self.send(dead_letters.open_letters(self.queue.name, self.pick(dead, 3))):
            assert opened is not None
            assert opened.payload.startswith(self.ledger.jobs[opened.letter.id].payload)
        if dead and self.rng.random() < 0.5:
            self._replay(self.rng.choice(dead))
        if dead and self.rng.random() < 0.3:
            self._purge(self.pick(dead, 5))

    def _purge(self, ids: list[str]) -> None:
        purged, again = self.send_twice(dead_letters.purge(self.queue.name, ids))
        assert purged == len(ids) or self.is_unsure
        assert not again
        for job_id in ids:
            job = self.ledger.jobs[job_id]
            job.is_purged = True
            job.is_freed |= job.batch is None

    def _replay(self, dead: str) -> None:
        job, header = self.make_job(None)
        # It received the outcomes that it waited for.
        job.parents, job.is_lenient, job.reads = (), False, False
        header = {
            name: value for name, value in header.items() if name not in ("after", "otherwise", "reads")
        }
        item = Submission(job.id, write_header(header | {"replay_of": dead}), job.payload)
        reply = self.send(submissions.submit(self.queue.name, [item]))[0]
        is_stored = reply.status in ("exists", "same") and self.is_unsure and reply.job_id == job.id
        if reply.status == "created" or is_stored:
            self.enter(job, header)
        else:
            assert reply.status in ("same", "conflict", "full", "too_large")

    def tell(self) -> None:
        """Deliver outcomes, fail to, or crash in between."""
        box, claim_ms = self.rng.choice(RELAYS), self.rng.choice(self.pace.leases)
        notices = self.send(outbox.claim(self.queue.name, self.rng.choice([1, 20, 100]), claim_ms, relay=box))
        self.observe([notice.outcome.job_id for notice in notices])
        for notice in notices:
            job_id = notice.outcome.job_id
            self.ledger.told(job_id, box)
            assert notice.outcome.state == self.ledger.jobs[job_id].state
            assert notice.tries > self.notices.get((job_id, box), 0)
            self.notices[job_id, box] = notice.tries
        for notice in notices:
            if self.rng.random() < 0.9:
                again_ms = self.rng.choice([None, None, None, self.pause_ms()])
                self.settle(notice.outcome.job_id, notice.tries, again_ms, box)

    def settle(self, job_id: str, tries: int, again_ms: int | None, box: str) -> None:
        """An earlier attempt has no effect any more."""
        job = self.ledger.jobs[job_id]
        if tries > 1 and self.rng.random() < 0.2:
            assert not self.send(outbox.finish_delivery(self.queue.name, job_id, tries - 1, None, relay=box))
        is_mine, again = self.send_twice(
            outbox.finish_delivery(self.queue.name, job_id, tries, again_ms, relay=box)
        )
        assert is_mine
        assert again in (None, True)
        if again_ms is None:
            job.settled.add(box)

    def switch(self) -> None:
        """An operator's calls."""
        match self.rng.randint(0, 2):
            case 0:
                self.send(registry.set_paused(self.queue.name, self.rng.random() < 0.2))
            case 1:
                wanted = limits.QueueLimits(
                    rate=self.rng.choice([None, None, 0.5, 10_000.0]),
                    jobs=self.rng.choice([None, None, 100]),
                    payload_bytes=self.rng.choice([None, None, 2000]),
                )
                self.send(limits.set_limits(self.queue.name, wanted))
            case 2:
                weights = {tenant: self.rng.randint(1, 3) for tenant in TENANTS}
                self.send(limits.set_weights(self.queue.name, weights))

    def look(self) -> None:
        """The totals: every total is the sum of its parts."""
        stats = registry.stats(self.send, self.queue.name)
        assert stats.counts.get("running", 0) == stats.leases
        assert stats.counts.get("queued", 0) == sum(stats.waiting.values()) + stats.followers
        counted, created = sum(stats.counts.values()), len(self.ledger.jobs)
        assert counted == created, f"{created} jobs were created and {counted} are counted: {stats.counts}"
        for batch in self.pick(self.ledger.batches, 2):
            counts = self.send(batches.counts(self.queue.name, batch))
            if counts is not None:
                assert counts.total == len(self.ledger.batches[batch])
                assert sum(counts.model_dump(exclude={"total"}).values()) == counts.total

    def jump(self) -> None:
        """Time advances, or steps back, or a day passes; a week removes the records that were not read."""
        if self.clock is None:
            return
        self.observe(sorted(self.ledger.active))
        kind = self.rng.choices(("seconds", "hour", "back", "day", "week"), (66, 12, 12, 6, 4))[0]
        if kind == "week":
            self.tell_all()
            self.week += 1
        if kind == "back":
            self.queue.names()  # removes expired data, which would reappear at an earlier time
        self.clock_s += {
            "seconds": self.rng.randint(1, 90), "hour": self.rng.randint(60, HOURS_S),
            "back": -self.rng.randint(60, 2 * HOURS_S), "day": 25 * HOURS_S, "week": 8 * DAY_MS // 1000,
        }[kind]  # fmt: skip
        self.clock.stop_at(self.clock_s)
        self.read_time()

    def tell_all(self) -> None:
        """Return every pending notification, claimed or not: none may be missing afterwards.

        A server that is killed after a claim replies to the repeated call without the notifications of the first one.
        """
        for box in RELAYS:
            key = f"{self.queue.prefix}outbox{':' if box else ''}{box}"
            while owed := self.queue.client.zrange(key, 0, -1):
                self.queue.client.zadd(key, dict.fromkeys(owed, 0))
                while notices := self.send(outbox.claim(self.queue.name, 64, 3_600_000, relay=box)):
                    self.observe([notice.outcome.job_id for notice in notices])
                    for notice in notices:
                        self.ledger.told(notice.outcome.job_id, box)
                        self.settle(notice.outcome.job_id, notice.tries, None, box)
