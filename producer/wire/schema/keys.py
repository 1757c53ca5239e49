"""The Redis names that Python uses. Names used only by scripts are defined there; docs/protocol.md lists all.

All of them start with `pagemill:{<queue>}:`. The braces make the queue name the hash tag, so that each queue
is in one Cluster slot and every script uses one slot. A script gets the prefix as its one declared key.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from pagemill.common.bounds import (
    ADAPTER_NAME,
    ADAPTER_NAME_RULE,
    MODEL_NAME,
    MODEL_NAME_RULE,
    REVISION_NAME,
    REVISION_NAME_RULE,
)
from pagemill.common.fingerprint import shortened
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.needs import BASE

QUEUE_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
TENANT_PATTERN = re.compile(r"[A-Za-z0-9._@-]{1,64}")
MODEL_PATTERN = MODEL_NAME
ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")


QUEUE_RULE = "a queue name is 1 to 64 of the characters A-Z a-z 0-9 . _ -"
TENANT_RULE = "a tenant is 1 to 64 of the characters A-Z a-z 0-9 . _ @ -"
MODEL_RULE = MODEL_NAME_RULE
ID_RULE = "an id is 1 to 64 of the characters A-Z a-z 0-9 . _ -"


def check_name(pattern: re.Pattern[str], rule: str, name: object) -> str:
    """Return a name. Raises InvalidJob if it is not text, or has other characters."""
    if not isinstance(name, str):
        raise InvalidJob(f"{rule}, as text, not {type(name).__name__}")
    if not pattern.fullmatch(name):
        raise InvalidJob(rule)
    return name


def _matches(pattern: re.Pattern[str], rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


# For settings and options.
QueueName = Annotated[str, _matches(QUEUE_PATTERN, QUEUE_RULE)]
TenantName = Annotated[str, _matches(TENANT_PATTERN, TENANT_RULE)]
ModelName = Annotated[str, _matches(MODEL_PATTERN, MODEL_RULE)]
AdapterName = Annotated[str, _matches(ADAPTER_NAME, ADAPTER_NAME_RULE)]
RevisionName = Annotated[str, _matches(REVISION_NAME, REVISION_NAME_RULE)]
PinnedRevision = Annotated[
    str,
    StringConstraints(strict=True, pattern=f"^{REVISION_NAME.pattern}$"),
    AfterValidator(shortened),
]
"""The form that workers announce: a full commit is shortened."""
Id = Annotated[str, _matches(ID_PATTERN, ID_RULE)]

PRIORITY_CLASSES = {"high": "0", "normal": "1", "low": "2"}


def prefix(queue: str) -> str:
    """Return the prefix of all keys and channels of a queue; also the one KEYS entry of every script."""
    return f"pagemill:{{{check_name(QUEUE_PATTERN, QUEUE_RULE, queue)}}}:"


def lane(needs: str, priority: str, tenant: str, model: str) -> str:
    """Return a lane, `<needs>:<class>:<tenant>:<model>`. The model may contain colons, so it is last."""
    return f"{needs}:{PRIORITY_CLASSES[priority]}:{tenant}:{model}"


def lane_model(model: str, adapter: str | None, revision: str | None = None) -> str:
    """Return a lane's last part, by which workers pull: a model or `<model>#<adapter>`, possibly `~<revision>`."""
    name = model if adapter is None else f"{model}#{adapter}"
    return name if revision is None else f"{name}~{revision}"


def split_lane(name: str) -> tuple[str, str, str, str]:
    """Return the needs, priority, tenant and model of a lane, without the revision that its jobs may be pinned to.

    A suspect's lane counts as high.
    """
    needs, letter, tenant, model = name.split(":", 3)
    names = {letter: priority for priority, letter in PRIORITY_CLASSES.items()}
    return needs, names.get(letter, "high"), tenant, model.partition("~")[0]


def served_name(lane_name: str) -> str:
    """Return the name under which workers pull from the lane."""
    return lane_name.split(":", 3)[3]


def needed_words(lane_name: str) -> tuple[str, ...]:
    """Return the words that a worker must know to pull from the lane."""
    return tuple(word for word in lane_name.partition(":")[0].split("+") if word != BASE)


def pinned_revision(lane_name: str) -> str | None:
    """Return the revision that the lane's jobs are pinned to."""
    return lane_name.partition("~")[2] or None


def job(queue: str, job_id: str) -> str:
    """Hash: state, lane, rank, accounting, token, progress."""
    return f"{prefix(queue)}job:{job_id}"


def payload(queue: str, job_id: str) -> str:
    """String: the envelope as submitted, byte for byte."""
    return f"{prefix(queue)}in:{job_id}"


def outcome(queue: str, job_id: str) -> str:
    """String: the result of a job that succeeded; otherwise its last error."""
    return f"{prefix(queue)}out:{job_id}"


def checkpoint(queue: str, job_id: str) -> str:
    """List: the deltas generated so far, which are both checkpoint and token feed."""
    return f"{prefix(queue)}ckpt:{job_id}"


def metadata(queue: str, job_id: str) -> str:
    """String: the caller's metadata, if there is any."""
    return f"{prefix(queue)}md:{job_id}"


def waiting(queue: str, lane_name: str) -> str:
    """Sorted set: job ids by submit sequence."""
    return f"{prefix(queue)}wait:{lane_name}"


def doorbell(queue: str, model: str) -> str:
    """List: one element per reason to pull; idle workers block on it with BLPOP."""
    return f"{prefix(queue)}bell:{model}"


def commands(queue: str, worker_id: str) -> str:
    """List: commands that the worker has not taken yet; it blocks on them with BLPOP."""
    return f"{prefix(queue)}commands:{worker_id}"


def ended_channel(queue: str) -> str:
    """Pub/sub: the id of every job that ended, and `batch:<id>` for each end inside a batch."""
    return f"{prefix(queue)}ended"


def cancel_channel(queue: str) -> str:
    """Pub/sub: the id of every running job that should stop."""
    return f"{prefix(queue)}cancel"


def feed_channel(queue: str) -> str:
    """Pub/sub: the id of every streaming job that has new tokens, or that ended."""
    return f"{prefix(queue)}feed"


def feeds_channel(queue: str) -> str:
    """Pub/sub: the ids of streaming jobs that received new tokens together, separated by spaces."""
    return f"{prefix(queue)}feeds"


def synced(queue: str) -> str:
    """String: written before waiting for the server's disk, so that there is a write to wait for."""
    return f"{prefix(queue)}synced"
