"""The error codes of jobs and of their executions. docs/protocol.md explains each."""

from __future__ import annotations

from typing import Literal

ErrorCode = Literal[
    "invalid_job",
    "prompt_too_long",
    "never_fits",
    "unknown_model",
    "schema_invalid",
    "schema_too_complex",
    "payload_too_large",
    "result_too_large",
    "unsigned",
    "unsupported_feature",
    "engine_error",
    "out_of_memory",
    "worker_lost",
    "output_invalid",
    "cancelled",
    "deadline_exceeded",
    "attempts_exhausted",
    "crash_suspect",
]

FINAL_CODES: frozenset[str] = frozenset(
    {
        "invalid_job",
        "prompt_too_long",
        "never_fits",
        "unknown_model",
        "schema_invalid",
        "schema_too_complex",
        "payload_too_large",
        "result_too_large",
        "unsigned",
        "unsupported_feature",
    }
)
"""The job itself is invalid: running it again gives the same error."""

RETRYABLE_CODES: frozenset[str] = frozenset(
    {"engine_error", "out_of_memory", "worker_lost", "output_invalid"}
)
"""Another execution may succeed."""

END_CODES: frozenset[str] = frozenset(
    {"cancelled", "deadline_exceeded", "attempts_exhausted", "crash_suspect"}
)
"""The job was ended from outside; not an error of an execution."""
