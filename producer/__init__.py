"""The producer: submit generation jobs to Pagemill and collect their results.

Importing it is cheap. Names load on first use, and only import redis and pydantic.
"""

from __future__ import annotations

from pagemill.common.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "pagemill.producer.client.sync": ("Producer",),
        "pagemill.producer.client.aio": ("AsyncProducer",),
        "pagemill.producer.client.handles": ("JobHandle", "BatchHandle", "DeadLetters"),
        "pagemill.producer.client.aio_handles": ("AsyncJobHandle", "AsyncBatchHandle", "AsyncDeadLetters"),
        "pagemill.producer.wire.calls.dead_letters": ("DeadLetter", "OpenedLetter"),
        "pagemill.producer.client.dead_letter_flow": ("Replay",),
        "pagemill.producer.wire.schema.dependencies": ("Condition",),
        "pagemill.producer.wire.schema.templates": ("escape_places",),
        "pagemill.producer.wire.schema.completion_estimate": ("CompletionEstimate",),
        "pagemill.producer.client.replay.verification": ("Verification",),
        "pagemill.producer.client.rollout.handles": ("ModelRollout", "AsyncModelRollout"),
        "pagemill.producer.wire.calls.rollouts": ("Rollout", "RolloutStatus", "SideFigures"),
        "pagemill.producer.wire.schema.job": (
            *("Job", "Message", "StructuredOutputs", "JobStatus", "Progress", "Result", "Output", "Usage"),
            *("StreamEvent", "BatchCounts", "BatchInfo", "BatchItem"),
        ),
        "pagemill.producer.wire.schema.errors": (
            *("PagemillError", "InvalidAddress", "InvalidJob", "InvalidOutput", "QueueFull"),
            *("DeadlineUnreachable", "IdempotencyConflict", "RedisRefused", "RedisUnavailable"),
            *("AccessDenied", "ResultTimeout", "JobNotFound", "ResultExpired", "StoreError", "Unverifiable"),
            *("RolloutRefused", "JobError", "JobFailed", "JobDead", "JobCancelled", "JobExpired"),
        ),
    },
)
