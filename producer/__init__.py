"""The producer: submit generation jobs to Pagemill and collect their results.

Importing it is cheap. Names load on first use, and import redis and pydantic only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.producer.client.aio import AsyncProducer
    from pagemill.producer.client.aio_handles import AsyncBatchHandle, AsyncDeadLetters, AsyncJobHandle
    from pagemill.producer.client.dead_letter_flow import Replay
    from pagemill.producer.client.handles import BatchHandle, DeadLetters, JobHandle
    from pagemill.producer.client.replay.verification import Verification
    from pagemill.producer.client.rollout.handles import AsyncModelRollout, ModelRollout
    from pagemill.producer.client.sync import Producer
    from pagemill.producer.wire.calls.dead_letters import DeadLetter, OpenedLetter
    from pagemill.producer.wire.calls.rollouts import Rollout, RolloutStatus, SideFigures
    from pagemill.producer.wire.schema.dependencies import Condition
    from pagemill.producer.wire.schema.errors import (
        AccessDenied,
        DeadlineUnreachable,
        IdempotencyConflict,
        InvalidAddress,
        InvalidJob,
        InvalidOutput,
        JobCancelled,
        JobDead,
        JobError,
        JobExpired,
        JobFailed,
        JobNotFound,
        PagemillError,
        QueueFull,
        RedisRefused,
        RedisUnavailable,
        ResultExpired,
        ResultTimeout,
        RolloutRefused,
        StoreError,
        Unverifiable,
    )
    from pagemill.producer.wire.schema.job import (
        BatchCounts,
        BatchInfo,
        BatchItem,
        Job,
        JobStatus,
        Message,
        Output,
        Progress,
        Result,
        StreamEvent,
        StructuredOutputs,
        Usage,
    )
    from pagemill.producer.wire.schema.promise import Promise
    from pagemill.producer.wire.schema.templates import escape_places

__all__ = [
    "Producer",
    "AsyncProducer",
    "JobHandle",
    "BatchHandle",
    "AsyncJobHandle",
    "AsyncBatchHandle",
    "DeadLetters",
    "AsyncDeadLetters",
    "DeadLetter",
    "OpenedLetter",
    "Replay",
    "Condition",
    "escape_places",
    "Promise",
    "Verification",
    "ModelRollout",
    "AsyncModelRollout",
    "Rollout",
    "RolloutStatus",
    "SideFigures",
    "Job",
    "Message",
    "StructuredOutputs",
    "JobStatus",
    "Progress",
    "Result",
    "Output",
    "Usage",
    "StreamEvent",
    "BatchCounts",
    "BatchInfo",
    "BatchItem",
    "PagemillError",
    "InvalidAddress",
    "InvalidJob",
    "InvalidOutput",
    "QueueFull",
    "DeadlineUnreachable",
    "IdempotencyConflict",
    "RedisRefused",
    "RedisUnavailable",
    "AccessDenied",
    "ResultTimeout",
    "JobNotFound",
    "ResultExpired",
    "StoreError",
    "Unverifiable",
    "RolloutRefused",
    "JobError",
    "JobFailed",
    "JobDead",
    "JobCancelled",
    "JobExpired",
]

_HOMES = {
    "pagemill.producer.client.sync": ("Producer",),
    "pagemill.producer.client.aio": ("AsyncProducer",),
    "pagemill.producer.client.handles": ("JobHandle", "BatchHandle", "DeadLetters"),
    "pagemill.producer.client.aio_handles": ("AsyncJobHandle", "AsyncBatchHandle", "AsyncDeadLetters"),
    "pagemill.producer.client.dead_letter_flow": ("Replay",),
    "pagemill.producer.wire.schema.promise": ("Promise",),
    "pagemill.producer.client.replay.verification": ("Verification",),
    "pagemill.producer.client.rollout.handles": ("ModelRollout", "AsyncModelRollout"),
    "pagemill.producer.wire.calls.rollouts": ("Rollout", "RolloutStatus", "SideFigures"),
    "pagemill.producer.wire.calls.dead_letters": ("DeadLetter", "OpenedLetter"),
    "pagemill.producer.wire.schema.dependencies": ("Condition",),
    "pagemill.producer.wire.schema.templates": ("escape_places",),
    "pagemill.producer.wire.schema.job": tuple(
        __all__[__all__.index("Job") : __all__.index("PagemillError")]
    ),
    "pagemill.producer.wire.schema.errors": tuple(__all__[__all__.index("PagemillError") :]),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
