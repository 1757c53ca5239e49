"""The fields of a job as keyword arguments: written from `Job`, so that a type checker knows them.

Rewritten by `python -m tests.producer.client.test_job_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.producer.client.images import Image
from pagemill.producer.wire.schema.dependencies import Condition, HasId
from pagemill.producer.wire.schema.text.chat import Message, NamedToolChoice, Tool


class RowFields(TypedDict, total=False):
    """Fields that a `Pipeline` sets for every row; `Job` describes each."""

    n: int
    best_of: int | None
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_tokens: int | None
    min_tokens: int
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    skip_special_tokens: bool
    structured_outputs: StructuredOutputs | Mapping[str, Any] | type[Any] | None
    thinking_token_budget: int | None
    label_probs: Literal["product", "mean", "constrained"] | None
    tools: Sequence[Tool | Mapping[str, Any]] | None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
    separate_reasoning: bool | None
    task: Literal["generate", "score", "embed", "classify", "rerank"]
    continuations: Sequence[str | Sequence[int]] | None
    inputs: Sequence[str | Sequence[int]] | None
    documents: Sequence[str] | None
    dimensions: int | None
    prompt_name: str | None
    rows_dtype: Literal["float32", "float16"]
    truncate: bool
    adapter: str | None
    revision: str | None
    priority: Literal["high", "normal", "low"]
    tenant: str
    deadline: float | None
    ttl: float | None
    delay: float | None
    run_at: float | None
    timeout: float | None
    max_attempts: int
    idempotency_key: str | None
    dedupe: bool
    key: str | None
    metadata: Mapping[str, Any] | None
    stream: bool
    keep_input: bool
    webhook: str | None
    traceparent: str | None
    response_format: Mapping[str, Any] | type[Any] | None


class JobFields(RowFields, total=False):
    """Fields that `submit` takes instead of a `Job`."""

    images: Image | Sequence[Image] | None
    """Pictures before the prompt, or before the text of the last user's message."""
    prompt: str | None
    messages: Sequence[Message | Mapping[str, Any]] | None
    prompt_token_ids: Sequence[int] | None
    model: str
    temperature: float
    after: str | HasId | Sequence[str | HasId] | Mapping[str, str | HasId] | None
    when: Mapping[str, Condition | Mapping[str, Any]] | None
    on_parent_failure: Literal["cancel", "run"]
