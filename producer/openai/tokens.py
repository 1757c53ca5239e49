"""/tokenize and /detokenize in vLLM's format, as jobs that need almost no computation.

Only a worker has the tokenizer. A prompt's tokens are those of its log-probabilities; a text without special tokens,
and tokens without a text, are a scored continuation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pagemill.common.sampling_fields import MAX_TOKEN_ID
from pagemill.producer.openai.formats import CHAT_URL, OPEN_TURNS, joined_text, read_jobs
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.outputs import PositionLogprobs, Result

TOKENIZE_URL = "/tokenize"
DETOKENIZE_URL = "/detokenize"

_PROMPT = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
_CONTINUATION = {"task": "score", "prompt_token_ids": [0]}


class TokenizeRequest(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    prompt: str


TOKEN_OPERATIONS: Mapping[str, tuple[type[BaseModel], type[BaseModel]]] = {
    TOKENIZE_URL: (TokenizeRequest, TokenizeAnswer),
    DETOKENIZE_URL: (DetokenizeRequest, DetokenizeAnswer),
}
"""The models of a request and its response, by URL."""


def read_tokens(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the job for a request. Raises InvalidJob."""
    given = {name: value for name, value in body.items() if value is not None}
    if url == DETOKENIZE_URL:
        kind = "tokens"
    else:
        kind = "messages" if "messages" in given else "prompt"
    if kind not in given:
        raise InvalidJob(f"{kind} is missing", param=kind)
    of_chats = {"messages", "tools", "chat_template_kwargs", *OPEN_TURNS}
    known = TOKEN_OPERATIONS[url][0].model_fields.keys() - ({"prompt"} if kind == "messages" else of_chats)
    for name in given.keys() - known:
        shown = name[:64]
        raise InvalidJob(f"parameter {shown} is not supported with {kind}", "unsupported_feature", shown)
    for name in ("add_special_tokens", "return_token_strs"):
        if not isinstance(given.get(name, False), bool):
            raise InvalidJob(f"{name}: Input should be a valid boolean", param=name)
    model = {"model": given["model"]} if "model" in given else {}
    if kind == "tokens":
        _check_token_ids(given["tokens"])
        return model | _CONTINUATION | {"continuations": [given["tokens"]]}
    if kind == "messages":
        return model | _chat(given) | _PROMPT
    if not isinstance(given["prompt"], str):
        raise InvalidJob("prompt: Input should be a valid string", param="prompt")
    if given.get("add_special_tokens", True):
        return model | {"prompt": given["prompt"]} | _PROMPT
    if not given["prompt"]:
        raise InvalidJob("prompt: should not be empty", param="prompt")
    return model | _CONTINUATION | {"continuations": [given["prompt"]]}


def _check_token_ids(tokens: Any) -> None:
    if not isinstance(tokens, list) or not tokens:
        raise InvalidJob("tokens: should be a list of token ids, and not empty", param="tokens")
    for number, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            place = f"tokens.{number}"
            raise InvalidJob(f"{place}: should be a token id, an integer of 0 or more", param=place)


def _chat(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("add_special_tokens"):
        message = "add_special_tokens: a chat's special tokens are its template's"
        raise InvalidJob(message, "unsupported_feature", "add_special_tokens")
    names = ("messages", "tools", "chat_template_kwargs", *OPEN_TURNS)
    (fields,) = read_jobs(CHAT_URL, {name: given[name] for name in names if name in given})
    return fields


def tokens_body(result: Result, max_model_len: int | None, *, has_texts: bool) -> dict[str, Any]:
    """Return the response of /tokenize. `has_texts`: with each token's text."""
    positions: tuple[PositionLogprobs | None, ...] = (
        result.prompt_logprobs or result.outputs[0].logprobs or ()
    )
    tokens = [position.chosen for position in positions if position is not None]
    return {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": [token.token_id for token in tokens],
        "token_strs": [token.text for token in tokens] if has_texts else None,
    }


def text_body(result: Result) -> dict[str, Any]:
    """Return the response of /detokenize, with the special tokens that the output's own text omits."""
    return {"prompt": joined_text(result.outputs[0].logprobs or ())}
