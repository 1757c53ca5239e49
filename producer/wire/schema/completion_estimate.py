"""The estimate of a job's end that a submission returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompletionEstimate:
    """When a job will probably end, in unix seconds by the server's clock; None while that is not known.

    Half of all jobs end by `p50`, nine of ten by `p90`, if the load stays as it was at submission and these
    jobs are like those before them.
    """

    p50: float | None = None
    p90: float | None = None
    deadline: float | None = None
    """The job's own deadline, also if it was set as a `ttl`."""
    wait_s: float | None = None
    """Median seconds until it starts."""

    @property
    def misses_deadline(self) -> bool | None:
        """True if the job will probably expire; None: unknown, or it has no deadline."""
        if self.p50 is None or self.deadline is None:
            return None
        return self.p50 > self.deadline

    def misses_start(self, now: float) -> bool:
        """Return whether the job will probably expire before it starts.

        Args:
            now: time of submission, in Unix seconds.

        Returns:
            False also if the wait or the deadline is unknown.
        """
        return self.wait_s is not None and self.deadline is not None and now + self.wait_s > self.deadline
