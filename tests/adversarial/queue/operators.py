"""The operators of a storm's queue: quotas, rollouts, a server that is short of memory."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.producer.wire.calls import registry, rollouts, transitions
from pagemill.producer.wire.calls.metering import quotas
from pagemill.producer.wire.calls.metering.quotas import Quota
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.rollouts import Rollout, RolloutStatus
from pagemill.producer.wire.calls.transitions import PulledJob
from tests.adversarial.queue.parties import MODELS, TENANTS, WORKERS, names_of, revision_of
from tests.adversarial.queue.readers import Readers

LARGE = 16_384


class Operators(Readers):
    """Settings that change while jobs run, and the conditions that hold for any values."""

    def set_quota(self) -> None:
        rng = self.rng
        wanted = Quota(
            tokens_per_minute=rng.choice([None, None, 1_000, 10**6]),
            jobs_per_minute=rng.choice([None, None, 1, 30]),
            tokens_per_day=rng.choice([None, None, 10**5]),
            jobs_per_day=rng.choice([None, None, 5, 200]),
        )
        tenant = rng.choice([*TENANTS, quotas.EVERYBODY])
        self.send(quotas.set_quotas(self.queue.name, {tenant: wanted if rng.random() < 0.5 else Quota()}))

    def clear_quotas(self) -> None:
        for tenant in (*TENANTS, quotas.EVERYBODY):
            self.send(quotas.set_quotas(self.queue.name, {tenant: Quota()}))

    def roll_out(self) -> None:
        name, model, share = self.queue.name, self.rng.choice(MODELS), self.rng.choice([0.0, 0.1, 0.5, 1.0])
        match self.rng.randint(0, 6):
            case 0 | 1:
                by = self.rng.choice(["id", "id", "tenant", "batch"])
                wanted = Rollout("r2", share, by=by, margin=self.rng.choice([0.05, 1.0]))  # type: ignore[arg-type]
                self.send_twice(rollouts.start(name, model, wanted))
            case 2 | 3:
                self.send_twice(rollouts.set_share(name, model, share))
            case 4:
                self.send_twice(rollouts.halt(name, model))
            case 5:
                self.send_twice(rollouts.roll_back(name, model))
            case 6:
                self.finish_rollout(model)

    def finish_rollout(self, model: str) -> None:
        """Like `rollout finish`."""
        if self.send(rollouts.end(self.queue.name, model)) != "none":
            while self.send(rollouts.move_back(self.queue.name, model)):
                pass
            (ended,) = self.queue.run(rollouts.statuses(self.queue.name, (model,)))
            assert self.send(rollouts.forget(self.queue.name, ended)) == "ok"

    def announce(self) -> None:
        """A worker lives for ten seconds more, or exits."""
        worker = self.rng.choice(WORKERS)
        info = WorkerInfo(id=worker, models=MODELS, revision=revision_of(worker))
        self.send(registry.heartbeat(self.queue.name, info))
        if self.rng.random() < 0.3:
            self.send(registry.unregister(self.queue.name, worker))

    def squeeze(self) -> None:
        """The server is nearly full for one sweep, and keeps all results."""
        client = self.queue.client
        client.config_set("maxmemory", max(1, int(client.info("memory")["used_memory"] * 1.25)))
        self.send(transitions.sweep(self.queue.name))
        client.config_set("maxmemory", 0)
        client.hdel(f"{self.queue.prefix}meta", "memory_at", "memory_looked")

    # Conditions on a pull.

    def check_pull(self, worker: str, jobs: Sequence[PulledJob], rollouts_then: list[RolloutStatus]) -> None:
        self._check_quotas([job.job_id for job in jobs if self.ledger.jobs[job.job_id].token == 0])
        for status in rollouts_then:
            for job in jobs:
                self._check_side(worker, job, status)

    def _check_quotas(self, started: list[str]) -> None:
        """A tenant that started jobs for the first time has not spent more of them than permitted."""
        limits = self.queue.run(quotas.quotas(self.queue.name))
        for tenant in {self.ledger.jobs[job_id].tenant for job_id in started}:
            quota = limits.get(tenant) or limits.get(quotas.EVERYBODY)
            text = self.queue.client.get(f"{self.queue.prefix}spent:{tenant}")
            if quota is None or text is None:
                continue
            _, minute_jobs, _, _, _, day_jobs = map(float, text.split())
            assert minute_jobs <= (quota.jobs_per_minute or float("inf")) + 1e-3, (
                f"{tenant} is over its quota"
            )
            assert day_jobs <= (quota.jobs_per_day or float("inf")), f"{tenant} is over its quota of the day"

    def _check_side(self, worker: str, pulled: PulledJob, status: RolloutStatus) -> None:
        job, is_canary = self.ledger.jobs[pulled.job_id], revision_of(worker) == status.to
        if job.model != status.model or job.revision is not None:
            assert job.revision in (None, revision_of(worker)), f"{job.id} is for revision {job.revision}"
            return
        if status.state in ("halted", "back"):
            assert not is_canary, f"{job.id} went to a canary that is {status.state}"
        others = status.stable.workers if is_canary else status.canary.workers
        if status.state != "open" or others == 0 or pulled.entries:
            return
        lane = self.queue.client.hget(f"{self.queue.prefix}job:{job.id}", "lane").decode()
        assert lane.endswith(f"~{status.to}") == is_canary, f"{job.id} is on the other side"

    def served(self, worker: str) -> tuple[str, ...]:
        """The names with which a worker pulls."""
        models = self.rng.choice([MODELS, MODELS[:1], MODELS[1:]])
        return names_of(models, revision_of(worker))
