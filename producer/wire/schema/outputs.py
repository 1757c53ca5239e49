"""The types of replies: status, progress, results, stream events, batches, checkpoints.

Times are unix seconds (float, UTC) by the server's clock, durations are seconds.
"""

from __future__ import annotations

import base64
import binascii
import struct
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import from_json

from pagemill.common.plain_text import escaped, shortened
from pagemill.producer.wire.schema.base_error import InvalidOutput
from pagemill.producer.wire.schema.text.chat import ToolCall, ToolCallDelta

T = TypeVar("T")

State = Literal["queued", "delayed", "running", "succeeded", "failed", "cancelled", "expired", "dead"]
EndState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
Phase = Literal["waiting", "prefill", "decode"]
FinishReason = Literal["stop", "length"]

ACTIVE_STATES: tuple[State, ...] = ("queued", "delayed", "running")
END_STATES: tuple[EndState, ...] = ("succeeded", "failed", "cancelled", "expired", "dead")


class WireModel(BaseModel):
    """A base that ignores fields of later releases, is immutable, and does not include its input in errors."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, hide_input_in_errors=True, allow_inf_nan=False, protected_namespaces=()
    )


@lru_cache(maxsize=64)
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


_LOGPROBS = ConfigDict(hide_input_in_errors=True, allow_inf_nan=False)
"""For dataclasses: a long output has tens of thousands of these objects, and models would use five times the memory."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_LOGPROBS)
class TokenLogprob:
    """One token and its log probability; None if the token was forced, or has no prediction."""

    token_id: int
    logprob: float | None
    text: str = ""
    """The token's text; for part of a character its bytes, as `bytes:\\xe4\\xbd`."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_LOGPROBS)
class PositionLogprobs:
    """The chosen token of one output position, and the most likely ones."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Output(WireModel):
    """One sample. `finish_reason` is None in partial output."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    logprob: float | None = None
    """The sum over the tokens of a scored continuation, or of the label. Omitted from the JSON of other outputs."""
    label: str | None = None
    """The most probable label, if the job requested `label_probs`; otherwise this and the next are omitted."""
    label_probs: dict[str, float] | None = None
    """The probability of every label, in the order of the choice. They add up to 1."""
    parsed: Any = None
    """The parsed value of the text, if the job requested JSON, and it was not cut off."""
    reasoning: str | None = None
    """The reasoning without its tags; None if there was none. This and `tool_calls` are omitted from the JSON
    of jobs without the fields of `ChatFields`, whose `text` is the complete output."""
    tool_calls: tuple[ToolCall, ...] = ()

    def parse(self, model: type[T]) -> T:
        """Return the text, which is JSON, as an instance of a class.

        Args:
            model: a pydantic class or another type.

        Returns:
            The instance.

        Raises:
            InvalidOutput: the text was cut off at `max_tokens`, or is not valid.
        """
        try:
            adapter: TypeAdapter[T] = _adapter(model)  # type: ignore[arg-type]  # a class is hashable
            return adapter.validate_json(self.text)
        except ValidationError as error:
            if self.finish_reason == "length":
                message = _cut_off(self, model)
            else:
                complaint = error.errors(include_input=False, include_url=False, include_context=False)[0]
                place = ".".join(map(str, complaint["loc"]))
                message = f"the output is not a valid {getattr(model, '__name__', model)}: {place}: {complaint['msg']}"
            raise InvalidOutput(message) from error


_NAMED_KEYS = 3


def _cut_off(output: Output, model: Any) -> str:
    """Return why JSON is incomplete, with the keys that the class does not declare, which indicate a loop."""
    length = f" of {len(output.token_ids)}" if output.token_ids else ""
    message = f"the output reached max_tokens{length} before its JSON was complete"
    declared = getattr(model, "model_fields", None)
    try:
        begun = from_json(output.text, allow_partial=True)
    except ValueError:
        begun = None
    if declared is not None and isinstance(begun, dict):
        known = {*declared, *(field.alias for field in declared.values())}
        if extra := [key for key in begun if key not in known]:
            names = ", ".join(extra[:_NAMED_KEYS])
            return f"{message}; it holds keys that {model.__name__} does not declare ({names}): set extra='forbid'"
    return f"{message}; submit the job again with a higher max_tokens"


RowsDtype = Literal["float32", "float16"]
_FORMATS: dict[RowsDtype, str] = {"float32": "f", "float16": "e"}


class Rows(WireModel):
    """Rows of numbers: `numpy.asarray(rows)` is an array of `shape`, `rows.to_lists()` returns lists."""

    dtype: RowsDtype
    shape: tuple[int, int]
    """Number of rows, and of values in each."""
    data: str
    """The values row by row, little-endian, as base64."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        try:
            size = len(self.raw)
        except binascii.Error:
            raise ValueError("data is not base64") from None
        if min(self.shape) < 0 or size != self.shape[0] * self.shape[1] * struct.calcsize(
            _FORMATS[self.dtype]
        ):
            raise ValueError("data does not have the size of its shape")
        return self

    @cached_property
    def raw(self) -> bytes:
        """The values as bytes: rows of little-endian floats."""
        return base64.b64decode(self.data, validate=True)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3."""
        kind = {"float32": "<f4", "float16": "<f2"}[self.dtype]
        return {"version": 3, "shape": self.shape, "typestr": kind, "data": self.raw}

    def to_lists(self) -> list[list[float]]:
        """Return the values, row by row."""
        count, width = self.shape
        numbers = struct.unpack(f"<{count * width}{_FORMATS[self.dtype]}", self.raw)
        return [list(numbers[width * row : width * (row + 1)]) for row in range(count)]


class Usage(WireModel):
    """Token counts of one job; `cached_tokens` are prompt tokens taken from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """The reasoning tokens among `completion_tokens`. Omitted from the JSON of jobs without separate reasoning."""


class Timing(WireModel):
    """Seconds from submission to the start, from the start to the first token, and from submission to the end."""

    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None


class Result(WireModel):
    """The result of a job that succeeded."""

    id: str
    outputs: tuple[Output, ...] = Field(min_length=1)
    usage: Usage = Usage()
    model: str
    seed: int | None = None
    tier: str = "continues"
    """The exactness of a resumed run: bitwise, token or continues."""
    fingerprint: str = ""
    """Identifies weights, dtype and device class; results with the same fingerprint are comparable."""
    attempt: int = 1
    resumed_tokens: int = 0
    """Output tokens that came from a checkpoint."""
    copied_from: str | None = None
    """The equal job that ran, if this one waited for its end (`dedupe`)."""
    timing: Timing = Timing()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One entry per prompt token, if requested; the first has no log-probability, since nothing precedes it."""
    metadata: dict[str, Any] | None = None
    rows: Rows | None = None
    """The values of an embed, classify or rerank job, with a row per text. Omitted from the JSON of others."""
    labels: tuple[str, ...] | None = None
    """The labels of the values in a row, if the job classified."""
    warnings: tuple[str, ...] | None = None
    """Notes on the output, for instance that it was verified instead of constrained. Omitted if empty."""

    @property
    def embeddings(self) -> list[list[float]]:
        """The vectors of an embed job; `numpy.asarray(result.rows)` is faster."""
        return self._given_rows().to_lists()

    @property
    def embedding(self) -> list[float]:
        """The first vector."""
        return self.embeddings[0]

    @property
    def scores(self) -> list[float]:
        """The scores of a rerank job, in the order of its documents."""
        return [row[0] for row in self._given_rows().to_lists()]

    @property
    def classes(self) -> list[dict[str, float]]:
        """For each text of a classify job, the value of each label."""
        return [dict(zip(self.labels or (), row, strict=True)) for row in self._given_rows().to_lists()]

    def _given_rows(self) -> Rows:
        if self.rows is None:
            raise ValueError(
                "the result has no rows of numbers: its job was not an embed, classify or rerank job"
            )
        return self.rows

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def parsed(self) -> Any:
        """The first output's parsed value."""
        return self.outputs[0].parsed

    def parse(self, model: type[T]) -> T:
        """Return the first output's text, which is JSON, as an instance of a class.

        Args:
            model: a pydantic class or another type.

        Returns:
            The instance.

        Raises:
            InvalidOutput: the text was cut off at `max_tokens`, or is not valid.
        """
        return self.outputs[0].parse(model)

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the first output, if a parser separated it from the text."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first output."""
        return self.outputs[0].tool_calls

    @property
    def label(self) -> str | None:
        """Chosen label of the first output, if the job had choices."""
        return self.outputs[0].label

    @property
    def label_probs(self) -> dict[str, float] | None:
        """Probability of each choice for the first output."""
        return self.outputs[0].label_probs

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first output ended."""
        return self.outputs[0].finish_reason


MAX_MESSAGE_CHARACTERS = 4_000


def _message(text: str) -> str:
    """Return a message that is safe for terminals and logs, since it may contain names written by others."""
    return shortened(escaped(text), MAX_MESSAGE_CHARACTERS)


class ErrorInfo(WireModel):
    """The reason that an execution or a job ended without a result."""

    code: str
    message: Annotated[str, AfterValidator(_message)]
    cause: str = ""
    """The error code of the last attempt, if `code` is attempts_exhausted; of the other job, if it is parent_failed."""
    retryable: bool = False
    partial: tuple[Output, ...] = ()


class Progress(WireModel):
    """The progress of a job. Token counts are sums over its samples."""

    phase: Phase = "waiting"
    prompt_tokens_done: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    max_tokens: int = 0
    kv_blocks: int = 0
    """Maximum KV blocks that the job holds; 0 while it waits, and after it has ended."""
    updated_at: float = 0.0


class JobStatus(WireModel):
    """One job at one moment. `position` counts the jobs ahead of it in its own waiting set."""

    id: str
    state: State
    queue: str
    model: str
    tenant: str
    priority: str
    attempt: int = 0
    """The number of the current or last execution; 0 before the first."""
    crashes: int = 0
    position: int | None = None
    created_at: float
    started_at: float | None = None
    """The start of the last execution."""
    finished_at: float | None = None
    deadline: float | None = None
    worker: str | None = None
    progress: Progress = Progress()
    error: str | None = None
    """The reason that the job failed, was retried, or waits."""
    leader: str | None = None
    """The equal job whose end this one shares; it does not run itself."""
    replay_of: str | None = None
    """The dead job that this one replays."""
    waits_for: tuple[str, ...] = ()
    """The jobs that it still waits for; it is delayed until they end."""
    metadata: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        """True if the job has reached a terminal state."""
        return self.state in END_STATES


class StreamEvent(WireModel):
    """One event of `stream()`.

    `token`: new tokens of sample `index` that start at `offset`. `snapshot`: the sample's full text and
    tokens so far, replacing earlier ones. `end`: the job ended in `state`; the last event, exactly once.
    """

    type: Literal["token", "snapshot", "end"]
    attempt: int = 0
    index: int = 0
    offset: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One entry per token, if the job requested them."""
    reasoning: str = ""
    """New reasoning; `text` does not contain it or tool calls, for jobs with any of `ChatFields`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """New parts of tool calls; in a snapshot, all of them so far."""
    state: EndState | None = None


class BatchCounts(WireModel):
    """Jobs of a batch by state. The states add up to `total` at every read."""

    total: int = 0
    queued: int = 0
    delayed: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    dead: int = 0

    @property
    def ended(self) -> int:
        """Number of jobs that have ended."""
        return self.succeeded + self.failed + self.cancelled + self.expired + self.dead

    @property
    def done(self) -> bool:
        """True if every submitted job has ended."""
        return self.ended == self.total


class BatchInfo(WireModel):
    """A batch of the queue, and its jobs by state."""

    id: str
    created_at: float
    counts: BatchCounts
    tenant: str | None = None
    """The tenant of all of its jobs; None if several tenants have jobs, or its jobs no longer exist."""


class BatchItem(WireModel):
    """The end of one job of a batch: its result or its error. Reading from `cursor` returns the next."""

    id: str
    key: str
    metadata: dict[str, Any] | None = None
    cursor: str
    state: EndState
    result: Result | None = None
    error: ErrorInfo | None = None
    superseded: bool = False
    """A recall replaced the first result: the job is returned a second time."""


class Delta(WireModel):
    """The tokens and text of one sample since its last checkpoint, from output position `offset` on."""

    index: int = Field(ge=0)
    offset: int = Field(ge=0)
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    syntax: str | None = None
    """The syntax of the sample's text, as `ChatSyntax` writes it; in the first delta of a sample of a job
    with any of `ChatFields`."""


class CheckpointSample(WireModel):
    """The checkpointed part of one sample."""

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    syntax: str | None = None


class Checkpoint(WireModel):
    """The state from which another worker continues. Contains only tokens: KV is never stored."""

    v: int = 1
    fingerprint: str = ""
    seed: int | None = None
    seqs: tuple[CheckpointSample, ...] = ()
