"""How the tokens of one request are chosen. Validated once, at construction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

from pagemill.engine.errors import InvalidRequest, SchemaInvalid, SchemaTooComplex, UnsupportedFeature

MAX_STOP_STRINGS = 64
MAX_SCHEMA = 65_536
"""Characters in a regex, JSON schema or grammar."""
MAX_SCHEMA_DEPTH = 64
"""Objects and arrays that may be nested in a JSON schema."""
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_LENGTH_PENALTY = 10.0
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 1e3
MAX_BIAS = 1e6
MAX_TOKEN_ID = 2**31 - 1
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM: any other token would be a matter of rounding."""

EarlyStopping = bool | Literal["never"]
"""When a beam search ends, once it has as many finished beams as its width. True: at once. False: when no live beam
would beat the worst of them as it stands. "never": when no live beam can beat it at any length."""


class StructuredShape(Protocol):
    """Anything with the fields of `StructuredOutputs`, as a job's class of that name has them."""

    @property
    def choice(self) -> tuple[str, ...] | None: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def json(self) -> str | None: ...
    @property
    def grammar(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What shape the output must have; exactly one of the fields is set.

    `choice`: the output is one of these strings. `regex`: it matches as a whole. `json`: it is a value that a JSON
    schema allows; the schema is text, or an object, which becomes text. `grammar`: it can be derived from a grammar
    in Lark's syntax or in GBNF. What a schema means is for the engine to find out; here only its size counts.
    """

    choice: tuple[str, ...] | None = None
    regex: str | None = None
    json: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs takes exactly one of choice, regex, json, grammar; got {given}"
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(dict.fromkeys(self.choice)))
            if not self.choice or any(not isinstance(label, str) or not label for label in self.choice):
                raise InvalidRequest("structured_outputs.choice needs at least one label, none of them empty")
            return
        schema: object = self.json  # an object is accepted, though the type says text
        if isinstance(schema, dict | bool):
            object.__setattr__(self, "json", _schema_text(schema))
        (kind,) = given
        text = getattr(self, kind)
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"structured_outputs.{kind} must be a text, and not an empty one")
        if len(text) > MAX_SCHEMA:
            raise SchemaTooComplex(f"structured_outputs.{kind} has more than {MAX_SCHEMA} characters")
        if kind == "json":
            _check_schema(text)

    @classmethod
    def like(cls, shape: StructuredShape) -> StructuredOutputs:
        return cls(choice=shape.choice, regex=shape.regex, json=shape.json, grammar=shape.grammar)


def _schema_text(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise SchemaTooComplex("structured_outputs.json nests too deep") from None
    except (TypeError, ValueError):
        raise SchemaInvalid("structured_outputs.json is not JSON") from None


def _check_schema(text: str) -> None:
    """Raises SchemaInvalid, SchemaTooComplex."""
    try:
        schema = json.loads(text)
        text.encode()
    except RecursionError:
        raise SchemaTooComplex("structured_outputs.json nests too deep") from None
    except ValueError:
        raise SchemaInvalid("structured_outputs.json is not JSON") from None
    if not isinstance(schema, dict | bool):
        raise SchemaInvalid("structured_outputs.json: a schema is an object, true or false")
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    if any(isinstance(value, dict | list) for value in level):
        raise SchemaTooComplex(
            f"structured_outputs.json nests more than {MAX_SCHEMA_DEPTH} objects and arrays"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, named as in OpenAI's and vLLM's APIs.

    `temperature` 0 is greedy, and so is any below 1e-5. `top_k` 0 or -1, `top_p` 1.0 and `min_p` 0.0 switch their
    filter off.
    `seed=None` draws one seed per request, so that a replay of the same request is a replay of its noise.
    `max_tokens=None` means the rest of the context. Raises `InvalidRequest` on values that make no sense.

    With `best_of`, so many samples are drawn and the n with the highest cumulative logprob returned, best first.
    With `beam_width`, nothing is drawn: a beam search returns its n best hypotheses, ranked by cumulative logprob /
    length ** length_penalty. Neither says anything before all of it has ended.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredShape | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop  # a bare string is accepted, though the type says tuple
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        shape = self.structured_outputs
        if shape is not None and not isinstance(shape, StructuredOutputs):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.like(shape))
        self._check_ranges()
        self._check_beam_search()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.beam_width is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side for one request."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """What is returned is known only at the end."""
        return self.beam_width is not None or self.num_sequences > self.n

    def _check_ranges(self) -> None:
        def need(condition: bool, message: str) -> None:
            if not condition:
                raise InvalidRequest(message)

        need(self.n >= 1, f"n must be at least 1, got {self.n}")
        need(
            self.best_of is None or self.best_of >= self.n,
            f"best_of ({self.best_of}) must not be less than n ({self.n})",
        )
        need(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens must be at least 1, got {self.max_tokens}",
        )
        need(self.min_tokens >= 0, f"min_tokens must not be negative, got {self.min_tokens}")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
        )
        # NaN is in no range.
        need(0.0 <= self.temperature <= MAX_TEMPERATURE, f"temperature must be in [0, {MAX_TEMPERATURE:g}]")
        need(-1 <= self.top_k <= MAX_TOKEN_ID, "top_k must be in [-1, 2**31)")
        need(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}")
        need(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}")
        need(self.seed is None or 0 <= self.seed <= MAX_SEED, f"seed must be in [0, 2**63), got {self.seed}")
        need(
            len(self.stop) <= MAX_STOP_STRINGS,
            f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}",
        )
        need(all(isinstance(s, str) and s for s in self.stop), "stop strings must be non-empty strings")
        need(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"repetition_penalty must be in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            need(-2.0 <= getattr(self, name) <= 2.0, f"{name} must be in [-2, 2]")
        need(
            all(-MAX_BIAS <= bias <= MAX_BIAS for bias in self.logit_bias.values()),
            f"logit_bias values must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
        )
        need(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids must not be empty",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or 0 <= value <= MAX_LOGPROBS, f"{name} must be in [0, {MAX_LOGPROBS}]")
        need(
            self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
            "truncate_prompt_tokens must be at least 1",
        )

    def _check_beam_search(self) -> None:
        if self.beam_width is None:
            if self.length_penalty != 1.0 or self.early_stopping is not False:
                raise InvalidRequest("length_penalty and early_stopping need a beam_width")
            return
        if self.beam_width < self.n:
            raise InvalidRequest(f"beam_width ({self.beam_width}) must not be less than n ({self.n})")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequest(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}'
            )
        refused = {
            "best_of": self.best_of is not None,
            "temperature": self.temperature not in (0.0, 1.0),
            "top_k": self.top_k > 0,
            "top_p": self.top_p != 1.0,
            "min_p": self.min_p != 0.0,
            "stop": bool(self.stop),
            "structured_outputs": self.structured_outputs is not None,
        }
        if names := [name for name, is_given in refused.items() if is_given]:
            raise UnsupportedFeature(f"a beam search takes no {', '.join(names)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What `LLM.beam_search` takes, named as in vLLM; all `beam_width` hypotheses are returned."""

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """The same as `SamplingParams`, which take the rest of the fields as well. Raises `InvalidRequest`."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(n=self.beam_width, **given)
