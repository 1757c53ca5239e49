"""The error codes of jobs and of their executions. docs/errors.md explains each."""

from __future__ import annotations

from typing import Literal, get_args

FinalCode = Literal[
    "invalid_job",
    "invalid_image",
    "prompt_too_long",
    "never_fits",
    "unknown_model",
    "unknown_adapter",
    "schema_invalid",
    "schema_too_complex",
    "schema_mismatch",
    "payload_too_large",
    "result_too_large",
    "unsigned",
    "sealed",
    "payload_lost",
    "unsupported_feature",
    "unknown_parent",
    "dependency_cycle",
    "too_many_children",
    "idempotency_conflict",
]
"""The job itself is invalid: running it again gives the same error."""
RetryableCode = Literal["engine_error", "out_of_memory", "worker_lost", "output_invalid", "store_unavailable"]
"""Another execution may succeed."""
EndCode = Literal[
    "cancelled",
    "deadline_exceeded",
    "attempts_exhausted",
    "crash_suspect",
    "parent_failed",
    "condition_false",
]
"""The job was ended externally; not an error of an execution."""
ErrorCode = Literal[FinalCode, RetryableCode, EndCode]

FINAL_CODES: frozenset[str] = frozenset(get_args(FinalCode))
RETRYABLE_CODES: frozenset[str] = frozenset(get_args(RetryableCode))
END_CODES: frozenset[str] = frozenset(get_args(EndCode))
