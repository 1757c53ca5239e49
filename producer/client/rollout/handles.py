"""Handles to a model's rollout; the programming interface of `pagemill rollout`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from pagemill.producer.client.base import AsyncDriver, Driver
from pagemill.producer.client.replay.flow import ReplayOptions
from pagemill.producer.client.replay.verification import Verification
from pagemill.producer.client.rollout import flow
from pagemill.producer.wire.calls.rollouts import Rollout, RolloutStatus


class ModelRollout:
    """Handle to the rollout of one model. Every method may raise RolloutRefused and RedisUnavailable."""

    __slots__ = ("_producer", "model")

    def __init__(self, producer: Driver, model: str) -> None:
        self._producer = producer
        self.model = model

    def start(self, wanted: Rollout, *, force: bool = False) -> RolloutStatus:
        """Start a rollout: give a revision a share of the model's jobs.

        Args:
            wanted: the revision, its share and the limits for an automatic halt.
            force: also if no live worker announces the revision.

        Returns:
            The rollout's status.

        Raises:
            RolloutRefused: another rollout is active, or no live worker has the revision.
        """
        return self._producer.run_flow(flow.start(self._producer.queue, self.model, wanted, force=force))

    def set_share(self, share: float) -> RolloutStatus:
        """Change the canary's share; a halted rollout resumes.

        Args:
            share: fraction of the jobs, 0 to 1.

        Returns:
            The rollout's status.

        Raises:
            RolloutRefused: the model has no rollout that can be changed.
        """
        return self._producer.run_flow(flow.set_share(self._producer.queue, self.model, share))

    def halt(self) -> RolloutStatus:
        """Send no new jobs to the canary until its share is set again."""
        return self._producer.run_flow(flow.halt(self._producer.queue, self.model))

    def roll_back(self) -> RolloutStatus:
        """Send no jobs to the canary."""
        return self._producer.run_flow(flow.roll_back(self._producer.queue, self.model))

    def finish(self) -> None:
        """Let all workers take all jobs again, and delete the rollout."""
        self._producer.run_flow(flow.finish(self._producer.queue, self.model))

    def status(self) -> RolloutStatus:
        """Return the rollout's status with both sides."""
        return self._producer.run_flow(flow.status(self._producer.queue, self.model))

    def compare(
        self, sample: int = 50, *, revision: str | None = None, timeout: float | None = None
    ) -> Iterator[Verification]:
        """Run jobs of the canary again on the stable revision and compare the results.

        Args:
            sample: maximum number of jobs.
            revision: the revision to compare with, instead of the stable one.
            timeout: seconds to wait for each copy; None: no limit.

        Yields:
            One comparison per job.

        Raises:
            RolloutRefused: the model has no rollout.
        """
        options = ReplayOptions(timeout=timeout, revision=revision)
        return self._producer.iterate_flow(
            flow.compare(self._producer.queue, self._producer.preparer, self.model, sample, options)
        )


class AsyncModelRollout:
    """Handle to the rollout of one model. Every method may raise RolloutRefused and RedisUnavailable."""

    __slots__ = ("_producer", "model")

    def __init__(self, producer: AsyncDriver, model: str) -> None:
        self._producer = producer
        self.model = model

    async def start(self, wanted: Rollout, *, force: bool = False) -> RolloutStatus:
        """Start a rollout: give a revision a share of the model's jobs.

        Args:
            wanted: the revision, its share and the limits for an automatic halt.
            force: also if no live worker announces the revision.

        Returns:
            The rollout's status.

        Raises:
            RolloutRefused: another rollout is active, or no live worker has the revision.
        """
        return await self._producer.run_flow(
            flow.start(self._producer.queue, self.model, wanted, force=force)
        )

    async def set_share(self, share: float) -> RolloutStatus:
        """Change the canary's share; a halted rollout resumes.

        Args:
            share: fraction of the jobs, 0 to 1.

        Returns:
            The rollout's status.

        Raises:
            RolloutRefused: the model has no rollout that can be changed.
        """
        return await self._producer.run_flow(flow.set_share(self._producer.queue, self.model, share))

    async def halt(self) -> RolloutStatus:
        """Send no new jobs to the canary until its share is set again."""
        return await self._producer.run_flow(flow.halt(self._producer.queue, self.model))

    async def roll_back(self) -> RolloutStatus:
        """Send no jobs to the canary."""
        return await self._producer.run_flow(flow.roll_back(self._producer.queue, self.model))

    async def finish(self) -> None:
        """Let all workers take all jobs again, and delete the rollout."""
        await self._producer.run_flow(flow.finish(self._producer.queue, self.model))

    async def status(self) -> RolloutStatus:
        """Return the rollout's status with both sides."""
        return await self._producer.run_flow(flow.status(self._producer.queue, self.model))

    def compare(
        self, sample: int = 50, *, revision: str | None = None, timeout: float | None = None
    ) -> AsyncIterator[Verification]:
        """Run jobs of the canary again on the stable revision and compare the results.

        Args:
            sample: maximum number of jobs.
            revision: the revision to compare with, instead of the stable one.
            timeout: seconds to wait for each copy; None: no limit.

        Yields:
            One comparison per job.

        Raises:
            RolloutRefused: the model has no rollout.
        """
        options = ReplayOptions(timeout=timeout, revision=revision)
        return self._producer.iterate_flow(
            flow.compare(self._producer.queue, self._producer.preparer, self.model, sample, options)
        )
