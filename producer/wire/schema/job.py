"""A job: its fields, limits and envelope. Results are in outputs.py and re-exported here.

The envelope is the job's JSON with its non-default fields and `v`, the envelope version. Workers validate it
again when they pull, so that an invalid job from any source fails alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pagemill.common.bounds import ADAPTER_NAME, Exact, InvalidParameter, Length, Range
from pagemill.common.json_values import check_json
from pagemill.common.sampling_fields import (
    DEFAULT_PROMPT_MAX_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_TOKEN_ID,
    MODEL_DEFAULTS,
    SAMPLING_FIELDS,
    Bias,
    SamplingFields,
    TokenId,
)
from pagemill.common.structured_outputs import StructuredOutputs, is_model
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.affinity import (
    adapter_affinity,
    chat_affinity,
    has_open_beginning,
    prompt_affinity,
    token_affinity,
)
from pagemill.producer.wire.schema.dependencies import DependencyFields
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.foreign_numbers import with_plain_numbers
from pagemill.producer.wire.schema.images import IMAGE_TOKENS_GUESS, MAX_IMAGES, InvalidImage, texts_of
from pagemill.producer.wire.schema.job_complaints import invalid_job
from pagemill.producer.wire.schema.needs import AFTER, ENVELOPE_VERSION, LATER_FIELDS, joined
from pagemill.producer.wire.schema.outputs import (
    ACTIVE_STATES,
    END_STATES,
    BatchCounts,
    BatchInfo,
    BatchItem,
    Checkpoint,
    CheckpointSample,
    Delta,
    EndState,
    ErrorInfo,
    FinishReason,
    JobStatus,
    Output,
    Phase,
    PositionLogprobs,
    Progress,
    Result,
    State,
    StreamEvent,
    Timing,
    TokenLogprob,
    Usage,
    WireModel,
)
from pagemill.producer.wire.schema.response_format import structure_of
from pagemill.producer.wire.schema.signing import split_payload
from pagemill.producer.wire.schema.tasks import POOLED_TASKS, REFUSED_FIELDS, TASKS, TaskName
from pagemill.producer.wire.schema.text.chat import CHAT_FIELDS, ChatFields, Message, history_tokens_text
from pagemill.producer.wire.schema.text.token_estimates import text_tokens, turn_tokens
from pagemill.producer.wire.schema.webhook_url import WebhookUrl

__all__ = [
    "Job", "Message", "StructuredOutputs", "SAMPLING_FIELDS", "DEFAULT_PROMPT_MAX_TOKENS", "JobStatus",
    "Progress", "Phase", "State", "EndState", "ACTIVE_STATES", "END_STATES", "Result", "Output",
    "FinishReason", "PositionLogprobs", "TokenLogprob", "Usage", "Timing", "ErrorInfo", "StreamEvent",
    "BatchCounts", "BatchInfo", "BatchItem", "Checkpoint", "CheckpointSample", "Delta", "WireModel",
]  # fmt: skip

DEFAULT_MAX_ATTEMPTS = 3
MAX_PAYLOAD_BYTES = 1 << 20
MAX_METADATA_BYTES = 16 << 10
MAX_METADATA_DEPTH = 16
MAX_KEY = 255
"""Maximum characters in an idempotency key, or in an item's name in its batch."""
MAX_MESSAGES = 1024
MAX_INPUTS = 2048
"""Maximum texts of one job for vectors, labels or scores."""
MAX_SECONDS = 366 * 86400.0
"""Maximum delay, ttl or timeout."""
CHAT_TOKENS_GUESS = 256
"""Expected output tokens of a chat without max_tokens."""

_Seconds = Annotated[float, Exact(), Range(0.0, MAX_SECONDS, above=True)]
_UnixTime = Annotated[float, Exact(), Range(0.0, 1e11)]
_Bool = Annotated[bool, Exact()]
_Key = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=MAX_KEY)]


_TextOrTokens = (
    Annotated[str, StringConstraints(strict=True, min_length=1)]
    | Annotated[tuple[TokenId, ...], Field(min_length=1)]
)
_Document = Annotated[str, StringConstraints(strict=True, min_length=1)]


class Job(WireModel, ChatFields, DependencyFields, SamplingFields):  # type: ignore[misc]  # frozen by its config, which mypy does not see
    """One job: exactly one of `prompt`, `messages`, `prompt_token_ids` and `inputs`, a model, and options.

    The task `generate` samples after the prompt. The task `score` returns the log-probabilities of `continuations`, or
    without any, of the prompt itself, and does not sample: of the sampling fields it accepts `logprobs`, for
    alternatives at each position, and `truncate_prompt_tokens`. The task `embed` returns a vector of the prompt or of
    each of `inputs`, `classify` a value per label, and `rerank` the score of the prompt with each of `documents`.

    `Job.parse` raises `InvalidJob`; the constructor raises pydantic's ValidationError.
    """

    model_config = ConfigDict(extra="forbid")

    task: TaskName = "generate"
    continuations: Annotated[tuple[_TextOrTokens, ...], Length(1, MAX_N)] | None = None
    """Texts or token ids that may follow the prompt, each to be scored separately."""
    inputs: Annotated[tuple[_TextOrTokens, ...], Length(1, MAX_INPUTS)] | None = None
    """Texts or token ids, each of which gets a row of the result."""
    documents: Annotated[tuple[_Document, ...], Length(1, MAX_INPUTS)] | None = None
    """Texts that the model reads after the prompt, each as a pair with it."""
    dimensions: Annotated[int, Exact(), Range(1, 1 << 20)] | None = None
    """Number of leading values of each vector to keep; for models trained for it (Matryoshka)."""
    prompt_name: _Key | None = None
    """Name of the model's built-in prompt to put before each text; None: its default, if it has one."""
    rows_dtype: Literal["float32", "float16"] = "float32"
    """Data type in which the result's values are stored."""
    truncate: _Bool = False
    """Truncate texts that are longer than the model accepts, instead of rejecting them."""
    prompt: Annotated[str, StringConstraints(strict=True, min_length=1)] | None = None
    messages: Annotated[tuple[Message, ...], Length(1, MAX_MESSAGES)] | None = None
    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    model: Annotated[str, StringConstraints(strict=True, pattern=f"^{keys.MODEL_PATTERN.pattern}$")]
    """The served name, never a path."""
    adapter: Annotated[str, StringConstraints(strict=True, pattern=f"^{ADAPTER_NAME.pattern}$")] | None = None
    """The name of an adapter that workers of the model have; None: the base model."""
    revision: keys.PinnedRevision | None = None
    """The revision of the model that must run it, as workers announce it, or a full commit; None: any."""
    priority: Literal["high", "normal", "low"] = "normal"
    tenant: Annotated[str, StringConstraints(strict=True, pattern=f"^{keys.TENANT_PATTERN.pattern}$")] = (
        "default"
    )
    deadline: _UnixTime | None = None
    """Unix seconds. A job that has not ended by then is expired."""
    ttl: _Seconds | None = None
    """A deadline in seconds after submission; with `deadline`, the earlier one applies."""
    delay: _Seconds | None = None
    """Seconds before the job may start."""
    run_at: _UnixTime | None = None
    """Unix seconds before which the job does not start."""
    timeout: _Seconds | None = None
    """Maximum seconds of one execution."""
    max_attempts: Annotated[int, Exact(), Range(1, 100)] = DEFAULT_MAX_ATTEMPTS
    """Maximum number of executions that end in the job's own retryable error."""
    idempotency_key: _Key | None = None
    dedupe: _Bool = False
    """Do not run while an equal job of the tenant waits or runs, but share its end. The outcome must depend
    on the job alone, so temperature 0 or a seed is required."""
    key: _Key | None = None
    """The item's name inside its batch."""
    metadata: dict[str, Any] | None = None
    """The caller's own JSON, returned with status and result."""
    stream: _Bool = False
    """Checkpoint often, so that `stream()` sees tokens early."""
    keep_input: Annotated[_Bool, Field(exclude=True)] = False
    """Keep the job as submitted for as long as its result, for `verify`. Not part of the envelope."""
    webhook: Annotated[str, StringConstraints(strict=True)] | None = None
    """An https URL to notify of the end. Workers only call allowed hosts, none by default."""
    traceparent: (
        Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
        | None
    ) = None
    # Declared again, because pydantic does not see the default factory in SamplingFields.
    logit_bias: Annotated[Mapping[int, Bias], Length(0, MAX_LOGIT_BIAS)] = Field(default_factory=dict)

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Job:
        """Create a job from its fields.

        Args:
            fields: the job's fields; `response_format` is accepted too.

        Returns:
            The validated job.

        Raises:
            InvalidJob: with every reason; the message never quotes the input.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_job(error, cls, ["response_format"]) from None

    @classmethod
    def from_payload(cls, payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> Job:
        """Create a job from its envelope, without checking a signature in front.

        Args:
            payload: the envelope's bytes.
            max_bytes: size limit of the envelope.

        Returns:
            The validated job.

        Raises:
            InvalidJob: the envelope is too large, is not JSON, or is not valid.
        """
        payload = split_payload(payload).envelope
        if len(payload) > max_bytes:
            raise too_large(len(payload), max_bytes)
        try:
            fields = json.loads(payload, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise InvalidJob("the payload is not JSON") from None
        version = fields.pop("v", None) if isinstance(fields, dict) else None
        if version != ENVELOPE_VERSION:
            raise InvalidJob(f"the payload is not an envelope of version {ENVELOPE_VERSION}")
        return cls.parse(fields)

    def to_payload(
        self, *, key: str | None = None, seed: int | None = None, max_bytes: int = MAX_PAYLOAD_BYTES
    ) -> bytes:
        """Return the job's envelope.

        Args:
            key: the key in a batch, if the job has none.
            seed: the seed, if the job needs one.
            max_bytes: size limit of the envelope.

        Returns:
            The envelope as JSON bytes.

        Raises:
            InvalidJob: the envelope exceeds the limit.
        """
        # The serializer itself returns bytes; model_dump_json would decode them.
        body = self.__pydantic_serializer__.to_json(self, exclude_defaults=True)
        added = self.stated_defaults()
        if key is not None and self.key is None:
            added += b'"key":%b,' % json.dumps(key).encode()
        if seed is not None and self.needs_seed:
            added += b'"seed":%d,' % seed
        payload = b'{"v":%d,%b%b' % (ENVELOPE_VERSION, added, body[1:])
        if len(payload) > max_bytes:
            raise too_large(len(payload), max_bytes)
        return payload

    @property
    def needs(self) -> str:
        """The words that a worker must know to run it, as the first part of its lane."""
        words = [AFTER] if self.after is not None else []
        words += [name for name in LATER_FIELDS if name in self.model_fields_set and self._sets(name)]
        return joined(*words)

    @property
    def is_parsed(self) -> bool:
        """True if its results separate reasoning and tool calls from the text."""
        if any(getattr(self, name) is not None for name in CHAT_FIELDS):
            return True
        return not all(message.is_plain for message in self.messages or ())

    @property
    def needs_seed(self) -> bool:
        """True if the result depends on a seed and the job has none."""
        return self.seed is None and self.label_probs is None and not TASKS[self.task].is_certain

    @property
    def is_repeatable(self) -> bool:
        """True if equal jobs have equal results."""
        return self.temperature == 0.0 or not self.needs_seed

    @property
    def width(self) -> int:
        """Maximum number of sequences that the job needs concurrently."""
        if self.task in POOLED_TASKS:
            return 1
        return self.num_sequences if self.task == "generate" else len(self.continuations or (None,))

    @property
    def texts(self) -> tuple[str | tuple[int, ...], ...]:
        """The texts of a job for vectors, labels or scores, one per row of its result."""
        given = self.inputs or self.documents
        if given is None:
            given = (self.prompt or self.prompt_token_ids or "",)
        return given

    def stated_defaults(self) -> bytes:
        """Return the envelope's members for fields set to Pagemill's defaults, since a model may have others."""
        stated = self.model_fields_set.intersection(MODEL_DEFAULTS)
        names = [name for name in MODEL_DEFAULTS if name in stated and not self._sets(name)] if stated else ()
        return b"".join(
            b'"%b":%b,' % (name.encode(), json.dumps(getattr(self, name)).encode()) for name in names
        )

    def sampling(self, model_defaults: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return arguments for the engine's SamplingParams, with `max_tokens` resolved for plain prompts.

        Args:
            model_defaults: the model's own sampling defaults, for fields that the job does not set. Scores,
                beams and probabilities of labels use the model's unmodified distribution.

        Returns:
            One argument for each sampling field.
        """
        fields = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        is_sampled = self.task == "generate" and self.beam_width is None and self.label_probs is None
        if model_defaults and is_sampled:
            fields |= {
                name: value for name, value in model_defaults.items() if name not in self.model_fields_set
            }
        if self.max_tokens is None and self.messages is None:
            fields["max_tokens"] = DEFAULT_PROMPT_MAX_TOKENS
        return fields

    def cost_tokens(self) -> int:
        """Estimate the KV tokens of the job: its prompt, and its output once per sample."""
        if self.prompt_token_ids is not None:
            prompt_tokens = len(self.prompt_token_ids)
        elif self.prompt is not None:
            prompt_tokens = text_tokens(self.prompt.encode())
        else:
            prompt_tokens = sum(turn_tokens(message.text.encode()) for message in self.messages or ())
            prompt_tokens += text_tokens(self._more_than_turns().encode()) - 1
            prompt_tokens += IMAGE_TOKENS_GUESS * len(self.images)
        return prompt_tokens + self.output_tokens()

    def output_tokens(self) -> int:
        """Return the maximum tokens in addition to the prompt, or an estimate."""
        if self.task != "generate":
            texts = self.continuations or self.inputs or self.documents or ()
            return sum(text_tokens(text.encode()) if isinstance(text, str) else len(text) for text in texts)
        if self.label_probs is not None and self.structured_outputs is not None:
            return sum(text_tokens(label.encode()) for label in self.structured_outputs.choice or ())
        default = CHAT_TOKENS_GUESS if self.messages is not None else DEFAULT_PROMPT_MAX_TOKENS
        return (self.max_tokens or default) * self.num_sequences

    def affinity(self) -> str | None:
        """Return a name that is equal for jobs whose prompts share a prefix; see affinity.py."""
        return adapter_affinity(self._prompt_affinity(), self.adapter)

    def _prompt_affinity(self) -> str | None:
        if self.after is not None and has_open_beginning(self._beginnings()):
            return None
        if self.prompt is not None:
            return prompt_affinity(self.prompt)
        if self.prompt_token_ids is not None:
            return token_affinity(self.prompt_token_ids)
        return None if self.messages is None else chat_affinity(self._beginnings())

    def _beginnings(self) -> Iterator[tuple[str, str]]:
        """Yield role and text of each turn, with hashes in place of images."""
        if self.prompt is not None:
            yield "user", self.prompt
        yield from ((message.role, message.beginning()) for message in self.messages or ())

    def templates(self) -> Iterator[tuple[str, str]]:
        """Yield the texts that may have placeholders for outputs of other jobs, each with its role."""
        if self.prompt is not None:
            yield "user", self.prompt
        for message in self.messages or ():
            yield from ((message.role, text) for text in texts_of(message.content))

    def digest(self) -> str:
        """Return a hash of the job's work: prompt, model and sampling, not schedule, tenant or priority."""
        return work_digest(self.settings_work(), self.prompt_work())

    def settings_work(self) -> bytes:
        """Return the job's work without its prompt, as bytes."""
        # A greedy job does not use its seed.
        fields = _WORK_FIELDS if self.temperature > 0.0 else _WORK_FIELDS - {"seed"}
        work = self.model_dump_json(include=fields, exclude_defaults=True).encode()
        return work + self.stated_defaults()

    def prompt_work(self) -> bytes:
        """Return the prompt in an unambiguous form."""
        if self.prompt is not None:
            return b"p" + self.prompt.encode()
        if self.prompt_token_ids is not None:
            return b"t" + ",".join(map(str, self.prompt_token_ids)).encode()
        return b"m" + b"".join(message.work() for message in self.messages or ())

    @property
    def images(self) -> tuple[str, ...]:
        """The URLs of its images, in order."""
        return tuple(url for message in self.messages or () for url in message.images)

    def _sets(self, name: str) -> bool:
        """Return whether a field is not at its default."""
        return bool(
            getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        )

    def _more_than_turns(self) -> str:
        """Return additional parts of a chat that the model sees: tools, and the calls of earlier turns."""
        shown = self.model_dump_json(include={"tools"}, exclude_none=True) if self.tools else ""
        return shown + history_tokens_text(self.messages or ())

    @model_validator(mode="before")
    @classmethod
    def _map_response_format(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if info.mode == "python":
            data = with_plain_numbers(data)
        if is_model(data.get("structured_outputs")):
            data = {**data, "structured_outputs": {"json": data["structured_outputs"]}}
        if data.get("response_format") is None:
            return data
        if data.get("structured_outputs") is not None:
            raise ValueError("response_format and structured_outputs exclude each other")
        fields = {name: value for name, value in data.items() if name != "response_format"}
        fields["structured_outputs"] = structure_of(data["response_format"])
        return fields

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _coerce_to_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _token_ids_in_range(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        if any(not 0 <= token_id <= MAX_TOKEN_ID for token_id in value):
            raise ValueError("token ids must be in [0, 2**31)")
        return value

    @field_validator("metadata")
    @classmethod
    def _small_json(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            metadata_json(value)
        return value

    @field_validator("webhook")
    @classmethod
    def _https(cls, value: str | None) -> str | None:
        if value is not None:
            WebhookUrl.parse(value)
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        self.check_together()
        self.check_tools()
        if len(self.images) > MAX_IMAGES:
            raise InvalidImage(f"the job has {len(self.images)} images, the limit is {MAX_IMAGES}")
        self.check_dependencies(text for _, text in self.templates())
        for name in self.model_fields_set & REFUSED_FIELDS[self.task]:
            if self._sets(name):
                raise InvalidParameter(f"a {self.task} job cannot have {name}", "unsupported_feature")
        if self.stream and self.task != "generate":
            raise InvalidParameter(
                f"a {self.task} job can't stream: it generates nothing", "unsupported_feature"
            )
        given = (self.prompt, self.messages, self.prompt_token_ids, self.inputs)
        if sum(value is not None for value in given) != 1:
            also = ", inputs" if "inputs" in TASKS[self.task].fields else ""
            raise ValueError(f"exactly one of prompt, messages, prompt_token_ids{also} is required")
        self._check_pooled()
        if self.is_parsed and (self.messages is None or self.task != "generate"):
            raise InvalidParameter(
                "tools and thinking need messages, and a generate job", "unsupported_feature"
            )
        if (
            self.structured_outputs is not None
            and self.tools
            and self.tool_choice not in (None, "none", "auto")
        ):
            raise InvalidParameter(
                "a forced tool call cannot be combined with structured_outputs: the function's schema is used"
            )
        if self.delay is not None and self.run_at is not None:
            raise ValueError("delay and run_at exclude each other")
        if self.dedupe and not self.is_repeatable:
            raise ValueError("dedupe takes temperature 0 or a seed: other jobs differ each time they run")
        if self.stream and (self.is_ranked or self.label_probs is not None):
            raise InvalidParameter(
                "best_of, beam_width and label_probs can't stream: what is returned is known at the end",
                "unsupported_feature",
            )
        return self

    def _check_pooled(self) -> None:
        if self.task not in POOLED_TASKS:
            return
        if self.messages is not None:
            raise InvalidParameter(
                f"a {self.task} job cannot have messages; set prompt", "unsupported_feature"
            )
        if self.task == "rerank" and self.documents is None:
            raise ValueError("a rerank job takes a prompt, the query, and documents")
        if self.documents is not None and self.prompt is None:
            raise ValueError("documents go with a prompt, the first text of each pair")


_WORK_FIELDS = {*SAMPLING_FIELDS, "model", "revision", *DependencyFields.model_fields}.union(
    ["task"], *(task.fields for task in TASKS.values())
)


def metadata_json(value: dict[str, Any]) -> str:
    """Return metadata as JSON. Raises ValueError if it is not plain JSON, or too large."""
    check_json(value, MAX_METADATA_DEPTH)
    text = json.dumps(value, ensure_ascii=False)
    if len(text.encode()) > MAX_METADATA_BYTES:
        raise ValueError(f"has more than {MAX_METADATA_BYTES} bytes of JSON")
    return text


def work_digest(settings: bytes, prompt: bytes, salt: str = "") -> str:
    """Return the hash of `Job.settings_work` and `Job.prompt_work`."""
    return hashlib.blake2b(settings + prompt, digest_size=12, salt=salt.encode()).hexdigest()


def too_large(size: int, max_bytes: int = MAX_PAYLOAD_BYTES) -> InvalidJob:
    return InvalidJob(f"the job has {size} bytes, the limit is {max_bytes}", "payload_too_large")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
