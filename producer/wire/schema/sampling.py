"""How the tokens of a job are chosen: the sampling fields of a job, with the ranges the engine accepts."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps, loads
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, StringConstraints, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from pagemill.producer.wire.schema.json_values import check_json
from pagemill.producer.wire.schema.outputs import WireModel

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_CHOICES = 1024
MAX_STRING = 4096
"""Characters in one stop string, bad word or choice."""
MAX_SCHEMA = 65_536
"""Characters in a regex, JSON schema or grammar."""
MAX_SCHEMA_DEPTH = 64
"""Objects and arrays that may be nested in a JSON schema."""
MAX_LENGTH_PENALTY = 10.0
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 1e3
MAX_BIAS = 1e6
"""Either way. A larger one would swallow the logits that it is added to, in fp32."""
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
DEFAULT_PROMPT_MAX_TOKENS = 16
"""`max_tokens` of a plain prompt that names none; a chat gets the rest of the context."""

# A number that is not silently made from a string or a bool.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bias = Annotated[float, Strict(), Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]
TokenId = Annotated[int, Strict(), Field(ge=0, le=MAX_TOKEN_ID)]
ShortText = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=MAX_STRING)]
SchemaText = Annotated[str, StringConstraints(strict=True, min_length=1)]


_TOO_DEEP = PydanticCustomError(
    "schema_too_complex", "nests more than {limit} objects and arrays", {"limit": MAX_SCHEMA_DEPTH}
)


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid", "hide_input_in_errors": True})
class StructuredOutputs:
    """The shape of the output; exactly one field is set.

    `json` is a schema: text, or the object itself, which is stored as text. Whether it means anything is for the
    worker to find out: it knows the tokens.
    """

    # NOTE: a dataclass, because a field named `json` would shadow a method of pydantic's BaseModel.
    choice: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    regex: SchemaText | None = None
    json: SchemaText | None = None
    grammar: SchemaText | None = None

    @field_validator("json", mode="before")
    @classmethod
    def _schema_as_text(cls, value: Any) -> Any:
        if isinstance(value, dict | bool):
            _check_depth(value)
            return dumps(value, ensure_ascii=False)
        return value

    @field_validator("regex", "json", "grammar")
    @classmethod
    def _bounded(cls, value: str | None) -> str | None:
        if value is not None and len(value) > MAX_SCHEMA:
            raise PydanticCustomError(
                "schema_too_complex", "has more than {limit} characters", {"limit": MAX_SCHEMA}
            )
        return value

    @field_validator("json")
    @classmethod
    def _is_a_schema(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            schema = loads(value)
        except RecursionError:
            raise _TOO_DEEP from None
        except ValueError:
            raise PydanticCustomError("schema_invalid", "is not JSON") from None
        if not isinstance(schema, dict | bool):
            raise PydanticCustomError("schema_invalid", "a schema is an object, true or false")
        _check_depth(schema)
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = sum(value is not None for value in (self.choice, self.regex, self.json, self.grammar))
        if given != 1:
            raise ValueError("structured_outputs takes exactly one of choice, regex, json, grammar")
        return self


def _check_depth(schema: Any) -> None:
    try:
        check_json(schema, MAX_SCHEMA_DEPTH)
    except RecursionError:
        raise _TOO_DEEP from None
    except ValueError as error:
        if "nested" in str(error):
            raise _TOO_DEEP from None
        raise PydanticCustomError("schema_invalid", "is not JSON") from None


class SamplingFields(WireModel):
    """The part of a job that the engine's SamplingParams mirrors, field for field.

    `temperature` 0 is greedy, and so is any below 1e-5. `top_k` 0 or -1, `top_p` 1.0 and `min_p` 0.0 switch their
    filter off.
    """

    n: Int = Field(default=1, ge=1, le=MAX_N)
    best_of: Int | None = Field(default=None, ge=1, le=MAX_N)
    """Samples drawn, of which the n likeliest are returned."""
    beam_width: Int | None = Field(default=None, ge=1, le=MAX_N)
    """Search instead of sampling, with so many beams, and return the n best hypotheses."""
    length_penalty: Float = Field(default=1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    early_stopping: Annotated[bool, Strict()] | Literal["never"] = False
    max_tokens: Int | None = Field(default=None, ge=1, le=MAX_TOKEN_ID)
    """None: 16 for a prompt, the rest of the context for messages."""
    min_tokens: Int = Field(default=0, ge=0, le=MAX_TOKEN_ID)
    temperature: Float = Field(default=1.0, ge=0.0, le=MAX_TEMPERATURE)
    top_k: Int = Field(default=0, ge=-1, le=MAX_TOKEN_ID)
    top_p: Float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: Float = Field(default=0.0, ge=0.0, le=1.0)
    seed: Int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: tuple[ShortText, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: Annotated[bool, Strict()] = False
    ignore_eos: Annotated[bool, Strict()] = False
    presence_penalty: Float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: Float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: Float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: Mapping[int, Bias] = Field(default_factory=dict, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: tuple[TokenId, ...] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS
    )
    bad_words: tuple[ShortText, ...] = Field(default=(), max_length=MAX_BAD_WORDS)
    logprobs: Int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: Int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: Int | None = Field(default=None, ge=1, le=MAX_TOKEN_ID)
    skip_special_tokens: Annotated[bool, Strict()] = True
    structured_outputs: StructuredOutputs | None = None

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _token_ids_in_range(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        if any(not 0 <= token_id <= MAX_TOKEN_ID for token_id in value):
            raise ValueError("logit_bias: token ids must be in [0, 2**31)")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not exceed max_tokens")
        return self

    @model_validator(mode="after")
    def _enough_to_choose_from(self) -> Self:
        for name in ("best_of", "beam_width"):
            count = getattr(self, name)
            if count is not None and count < self.n:
                raise ValueError(f"{name} must not be less than n")
        if self.beam_width is None and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping need a beam_width")
        return self

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side for one job."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """What is returned is known only at the end."""
        return self.beam_width is not None or self.num_sequences > self.n


SAMPLING_FIELDS: tuple[str, ...] = tuple(SamplingFields.model_fields)
