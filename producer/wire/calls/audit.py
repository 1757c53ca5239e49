"""Canaries and recalls as transitions: deviating workers, and the jobs that they committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import WireModel
from pagemill.producer.wire.server.scripts import Call, as_map

Verdict = Literal["clean", "alone", "disputed", "deviates", "changed"]
SettleReply = Literal["superseded", "left", "gone", "already_done"]
AuditState = Literal["quarantined", "disputed", "kept", ""]


@dataclass(frozen=True, slots=True)
class AuditView:
    """The canary state of a worker."""

    state: AuditState
    """kept: an operator ended its quarantine. Empty: no deviation, or unknown."""
    reason: str
    is_wanted: bool
    """Two others disagree, and its answer decides."""
    position: int
    """The number of jobs that it has committed, including deleted entries."""
    has_more: bool
    """Call again: there is more to delete."""
    answers: tuple[str, ...]


def view(
    queue: str, worker_id: str, what: str, input_bytes: int, *, with_answers: bool = False
) -> Call[AuditView]:
    """Return the canary state of a worker. From its first call on, the jobs that it commits are listed.

    Args:
        what: key of the function that it computes.
        input_bytes: bytes of these jobs' inputs to keep until their results are known to be correct.
    """
    args = (worker_id, what, input_bytes, int(with_answers))
    return Call("audit_look", (keys.prefix(queue),), args, _view)


def vote(
    queue: str, worker_id: str, what: str, answer: str, num_answers: int, position: int
) -> Call[tuple[Verdict, str]]:
    """Compare a worker's answer to the canaries with the others'. Returns the verdict and the reason.

    Args:
        answer: its own, or the earlier one that it agrees with.
        num_answers: the number of answers it was compared with.
        position: the one that `view` returned before the canary. If the worker is clean, so are its jobs up to it.
    """
    args = (worker_id, what, answer, num_answers, position)
    return Call("audit_vote", (keys.prefix(queue),), args, _verdict)


def _view(reply: list[Any]) -> AuditView:
    found = as_map(reply)
    return AuditView(
        state=found["state"].decode(),
        reason=found["reason"].decode(),
        is_wanted=bool(found["is_wanted"]),
        position=found["position"],
        has_more=bool(found["has_more"]),
        answers=tuple(answer.decode() for answer in found["answers"]),
    )


def _verdict(reply: list[bytes]) -> tuple[Verdict, str]:
    verdict: Any = reply[0].decode()
    return verdict, reply[1].decode()


class Accused(WireModel):
    """A worker that deviates, or that disagrees with another one."""

    worker: str
    state: str
    """quarantined, or disputed: a third worker must decide."""
    reason: str
    accused_at: float
    clean_at: float | None = None
    """Time of its last clean canary; None if it had none."""
    jobs: int
    """Jobs on its list: those that it committed since the canary before."""
    is_cut: bool = False
    """True if it also committed earlier jobs, which are not listed."""


def accused(queue: str) -> Call[list[Accused]]:
    """Return the workers that deviate or disagree, the latest first."""
    return Call(
        "recall_list", (keys.prefix(queue),), ("", 0), lambda reply: [_accused(*one) for one in reply]
    )


def listed_jobs(queue: str, worker_id: str, limit: int) -> Call[list[str]]:
    """Return the first jobs of a worker's list."""
    return Call(
        "recall_list",
        (keys.prefix(queue),),
        (worker_id, limit),
        lambda reply: [job_id.decode() for job_id in reply[0]],
    )


def replace_first(
    queue: str, worker_id: str, job_id: str, copy_id: str = "", result: bytes = b""
) -> Call[SettleReply]:
    """Remove the first job from a worker's list; with a copy, its result replaces the job's."""
    args = (worker_id, job_id, copy_id, result)
    return Call("recall_settle", (keys.prefix(queue),), args, lambda reply: reply.decode())


def close(queue: str, worker_id: str, *, keep: bool) -> Call[int]:
    """End a worker's recall. `keep`: its results stay, and it may pull again.

    Returns 1; 0 for a worker that is not accused; -1: call again.
    """
    return Call("recall_keep", (keys.prefix(queue),), (worker_id, int(not keep)), int)


def _accused(worker: bytes, flat: list[bytes], jobs: int, *_: Any) -> Accused:
    known = {name: value.decode() for name, value in as_map(flat).items()}
    clean_at = known.get("clean_at")
    return Accused(
        worker=worker.decode(),
        state=known.get("state", ""),
        reason=known.get("reason", ""),
        accused_at=int(known.get("accused_at", 0)) / 1000,
        clean_at=None if clean_at is None else int(clean_at) / 1000,
        jobs=jobs,
        is_cut="lost_to" in known,
    )
