"""What a submit says about a job's end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """When a job will probably end, in unix seconds by the server's clock; None while that is not known.

    Half of all jobs end by `p50`, nine of ten by `p90`, if the load stays as it was at the submit and these jobs are
    like those before them.
    """

    p50: float | None = None
    p90: float | None = None
    deadline: float | None = None
    """The job's own, also where it was given as a `ttl`."""

    @property
    def misses_deadline(self) -> bool | None:
        """Whether the job will more probably than not be expired; None: not known, or it has no deadline."""
        if self.p50 is None or self.deadline is None:
            return None
        return self.p50 > self.deadline
