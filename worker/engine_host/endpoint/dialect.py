"""Dialects of engines: the fields that each accepts, the request of a job, and the pieces of its response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pagemill.common.sampling_fields import SamplingFields
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.outputs import FinishReason
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.engine_host.endpoint.connection import BadAnswer

_STANDARD = frozenset({"temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"})
"""Sampling fields that every endpoint supports."""
_ELSEWHERE = frozenset({
    "n", "max_tokens", "best_of", "beam_width", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs",
    "structured_outputs", "thinking_token_budget", "label_probs", "truncate_prompt_tokens",
})  # fmt: skip
"""Sampling fields that are not sent, or are sent under other names."""
_OPTIONAL = {field.name for field in fields(SamplingFields)} - _STANDARD - _ELSEWHERE
_DEFAULTS = SamplingFields()
_MAX_SEED = 2**31
_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The fields that an engine accepts beyond OpenAI's interface."""

    name: str = "unknown"
    fields: frozenset[str] = frozenset()
    """Sampling fields, under Pagemill's names."""
    has_samples: bool = False
    """`n` samples in one request."""
    counts_tokens: bool = False
    """Each event can contain the tokens so far (`continuous_usage_stats`)."""
    returns_ids: bool = False
    """Token ids on request (`return_token_ids`)."""
    has_salt: bool = False
    """`cache_salt` keeps the prefixes of tenants separate."""
    continues_chat: dict[str, Any] | None = None
    """Fields that make it continue a last message of the assistant; None if it cannot."""


VLLM = Dialect(
    "vllm", frozenset(_OPTIONAL), has_samples=True, counts_tokens=True, returns_ids=True, has_salt=True,
    continues_chat={"continue_final_message": True, "add_generation_prompt": False},
)  # fmt: skip
SGLANG = Dialect(
    "sglang",
    frozenset({
        "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens",
        "logit_bias",
    }),
    has_samples=True, counts_tokens=True, continues_chat={"continue_final_message": True},
)  # fmt: skip
LLAMA_CPP = Dialect("llamacpp", frozenset({"top_k", "min_p", "ignore_eos", "logit_bias"}), continues_chat={})
PAGEMILL = Dialect("pagemill", frozenset(_OPTIONAL), has_samples=True)
DIALECTS = {dialect.name: dialect for dialect in (VLLM, SGLANG, LLAMA_CPP, PAGEMILL)}
"""Keyed by `owned_by` in the endpoint's list of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request to the endpoint: a prompt, or messages, for one or more samples of a job."""

    model: str
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Any] | None = None
    params: SamplingParams
    max_tokens: int | None
    first: int = 0
    """The index of the first sample."""
    num_samples: int = 1
    is_resumed: bool = False
    """The prompt, or a last message, contains the start of the output."""
    salt: str = ""

    @property
    def path(self) -> str:
        return "/completions" if self.messages is None else "/chat/completions"


def accepts_all(dialect: Dialect) -> bool:
    """Return whether the engine supports all sampling fields."""
    return dialect.fields >= _OPTIONAL


def unsupported(params: SamplingParams, dialect: Dialect) -> bool:
    """Return whether a request sets a sampling field that the engine does not support."""
    return any(
        getattr(params, name) != getattr(_DEFAULTS, name) for name in _OPTIONAL if name not in dialect.fields
    )


def body(query: Query, dialect: Dialect) -> dict[str, Any]:
    """Return the body of a streaming request."""
    params = query.params
    usage = {"include_usage": True} | ({"continuous_usage_stats": True} if dialect.counts_tokens else {})
    made: dict[str, Any] = {"model": query.model, "stream": True, "stream_options": usage}
    made |= {"prompt": query.prompt} if query.messages is None else {"messages": list(query.messages)}
    made |= {"temperature": params.temperature, "top_p": params.top_p}
    if query.max_tokens is not None:
        made["max_tokens"] = query.max_tokens
    if params.seed is not None:
        made["seed"] = (params.seed + query.first) % _MAX_SEED
    if query.num_samples > 1:
        made["n"] = query.num_samples
    for name in sorted({"stop", "presence_penalty", "frequency_penalty"} | (_OPTIONAL & dialect.fields)):
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            made[name] = {str(key): bias for key, bias in value.items()} if name == "logit_bias" else value
    if dialect.returns_ids:
        made["return_token_ids"] = True
    if dialect.has_salt and query.salt:
        made["cache_salt"] = query.salt
    if query.is_resumed and query.messages is not None:
        made |= dialect.continues_chat or {}
    if params.structured_outputs is not None:
        made |= _structure(params.structured_outputs)
    return made


def _structure(shape: StructuredOutputs) -> dict[str, Any]:
    """Return a JSON schema in OpenAI's form, which all engines with grammars support; the rest in vLLM's."""
    if shape.json is not None:
        schema = {"name": "output", "schema": json.loads(shape.json), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    given = {name: getattr(shape, name) for name in ("choice", "regex", "grammar")}
    return {"structured_outputs": {name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that an event adds to one sample."""

    index: int
    text: str
    token_ids: list[int] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Counts:
    """The token counts of an event, for all samples together."""

    prompt: int
    completion: int
    cached: int


def pieces(event: dict[str, Any], num_samples: int) -> list[Piece]:
    """Return the pieces that an event adds. Raises `BadAnswer`."""
    if event.get("error") is not None:
        raise BadAnswer("the engine reports an error in its stream")
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer("an event of the engine's stream has no choices")
    return [_piece(choice, num_samples) for choice in choices]


def _piece(choice: Any, num_samples: int) -> Piece:
    if not isinstance(choice, dict):
        raise BadAnswer("a choice of the engine's stream is not an object")
    index, delta = choice.get("index", 0), choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    text = "" if text is None else text
    ids, ended, why = choice.get("token_ids"), choice.get("finish_reason"), choice.get("stop_reason")
    is_valid = (
        type(index) is int
        and 0 <= index < num_samples
        and isinstance(text, str)
        and (ids is None or (isinstance(ids, list) and all(type(token) is int for token in ids)))
        and (ended is None or (isinstance(ended, str) and ended in _REASONS))
    )
    if not is_valid:
        raise BadAnswer("a choice of the engine's stream cannot be used")
    if ids is not None and not all(0 <= token < 2**31 for token in ids):
        raise BadAnswer("the engine's stream has token ids out of range")
    reason = None if ended is None else _REASONS[ended]
    clean = text.encode("utf-8", "replace").decode()
    return Piece(index, clean, ids, reason, why if type(why) in (int, str) else None)


def counts(event: dict[str, Any]) -> Counts | None:
    """Return the token counts of an event; None if it has none."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    values = (
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        details.get("cached_tokens") if isinstance(details, dict) else 0,
    )
    prompt, completion, cached = (v if type(v) is int and 0 <= v < 2**31 else 0 for v in values)
    return Counts(prompt, completion, min(cached, prompt))
