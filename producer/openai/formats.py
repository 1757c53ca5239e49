"""OpenAI's formats: request bodies converted to jobs, results written as completions.

Only supported fields are accepted. Any other fails with an error that names it, unless its value has no effect.
Formats: the API's reference, "Chat completions" and "Completions".
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from pagemill.producer.openai.pooled_formats import POOLED_URLS, encoding_of, read_pooled
from pagemill.producer.openai.pooled_schemas import EMBEDDINGS_URL
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_METADATA_BYTES, SAMPLING_FIELDS, Job
from pagemill.producer.wire.schema.outputs import Output, PositionLogprobs, Result, TokenLogprob, Usage
from pagemill.producer.wire.schema.text.chat import CHAT_FIELDS

Url = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"
]
URLS: tuple[str, ...] = get_args(Url)
"""The URLs that a batch's lines may have."""
CHAT_URL, COMPLETIONS_URL = URLS[:2]

_SPELLED = re.compile(r"bytes:(\\x[0-9a-f]{2})+")
MAX_PROMPTS = 128
"""Maximum prompts in one request for completions."""
_MAX_WHOLE = 2**53
"""Floats are exact up to this number."""
_SEEDS = 2**63
_MAX_SHOWN = 64
"""Maximum characters of an unknown field's name that an error quotes."""

_SAMPLING = frozenset(SAMPLING_FIELDS) - {"prompt_logprobs", *CHAT_FIELDS}
STRUCTURES: Mapping[str, str] = {
    **{f"guided_{kind}": kind for kind in ("json", "choice", "regex", "grammar")},
    "regex": "regex",
    "ebnf": "grammar",
}
"""Other names of a member of `structured_outputs`: vLLM's earlier ones, and SGLang's."""
OPEN_TURNS = ("add_generation_prompt", "continue_final_message")
"""vLLM's fields for the end of a chat's prompt: a new turn of the assistant, or its last message."""
_COMMON = _SAMPLING | {"model", "response_format"} | STRUCTURES.keys()
ANNOTATIONS = frozenset({"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Text fields that do not affect the output."""
HINTS = frozenset({"prompt_cache_options", "client_metadata", "access_programs"})
"""Objects that do not affect the output."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "verbosity": ("medium",),
}
"""Unsupported fields, with the values that have no effect."""
_INSTEAD: Mapping[str, str] = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "store": "only chats and responses are stored, and not in a batch: send false",
    "modalities": "answers are text",
    "thinking": "use chat_template_kwargs or reasoning_effort",
    "thinking_budget": "use thinking_token_budget",
    "include_reasoning": "use separate_reasoning",
    "enable_thinking": "use chat_template_kwargs",
    "reasoning": "use reasoning_effort",
    "max_new_tokens": "use max_tokens",
    "use_beam_search": "use beam_width",
    "guided_decoding_backend": "leave it out",
    "guided_whitespace_pattern": "leave it out",
    "json_schema": "use response_format",
    "web_search_options": "offer a function in tools",
}
"""Replacements for some of them."""
FIELDS: Mapping[str, frozenset[str]] = {
    CHAT_URL: _COMMON | CHAT_FIELDS | {"messages", "max_completion_tokens", "top_logprobs", *OPEN_TURNS},
    COMPLETIONS_URL: _COMMON | {"prompt", "echo"},
}
"""Fields that a request may have, by URL."""


def read_jobs(url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the jobs' fields, one job per prompt; the caller handles `stream` and `stream_options`.

    Raises InvalidJob for an unsupported field. `Job.parse` checks the values.
    """
    body = {name: _as_integer(value) for name, value in body.items()}
    if url in POOLED_URLS:
        return read_pooled(url, body)
    fields = _read_structures(_supported(url, body))
    _read_seed(fields)
    if (
        type(fields.get("top_p")) is int and fields["top_p"] == 0
    ):  # as in the API: only the most probable token
        fields |= {"top_p": 1, "top_k": 1}
    if fields.get("reasoning_effort") == "max":
        fields["reasoning_effort"] = "xhigh"
    if url == COMPLETIONS_URL:
        prompts = _prompts(fields.pop("prompt", None))
        fields = _read_echo(fields)
        return [fields | prompt for prompt in prompts]
    most = read_bound(fields, "max_completion_tokens")
    if most is not None and fields.setdefault("max_tokens", most) != most:
        raise InvalidJob("max_tokens and max_completion_tokens exclude each other", param="max_tokens")
    _read_chat_logprobs(fields)
    _read_tools(fields)
    _read_open_turns(fields)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_message(i, message) for i, message in enumerate(messages)]
    return [fields]


def _read_seed(fields: dict[str, Any]) -> None:
    """Read OpenAI's range of seeds, which has negative ones. Of these -1 means random, as in other servers."""
    seed = fields.get("seed")
    if type(seed) is int and -_SEEDS <= seed < 0:
        fields["seed"] = seed + _SEEDS
        if seed == -1:
            del fields["seed"]


def read_bound(fields: dict[str, Any], name: str) -> int | None:
    """Remove OpenAI's other name of `max_tokens` from the fields. Raises InvalidJob under that name."""
    value = _as_integer(fields.pop(name, None))
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidJob(f"{name}: Input should be an integer of 1 or more", param=name)
    return value


def _as_integer(value: Any, depth: int = 2) -> Any:
    """Return integral floats as integers, also in lists, since some languages and libraries only have floats."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MAX_WHOLE else value
    if depth and isinstance(value, list) and any(isinstance(item, float | list) for item in value):
        return [_as_integer(item, depth - 1) for item in value]
    return value


def _read_structures(fields: dict[str, Any]) -> dict[str, Any]:
    """Read the other names of structured outputs. Raises InvalidJob if there are several."""
    given = [name for name in STRUCTURES if name in fields]
    if not given:
        return fields
    names = [name for name in (*given, "structured_outputs", "response_format") if name in fields]
    if len(names) > 1:
        raise InvalidJob(f"{names[0]} and {names[1]} exclude each other", param=names[0])
    fields["structured_outputs"] = {STRUCTURES[names[0]]: fields.pop(names[0])}
    return fields


def read_job(url: str, body: Any) -> dict[str, Any]:
    """Return the fields of a request that must be a single job, as in a batch's lines. Raises InvalidJob."""
    if url not in URLS:
        raise InvalidJob(f"only {' and '.join(URLS)} are supported", "unsupported_feature", "url")
    if not isinstance(body, Mapping):
        raise InvalidJob("body must be an object", param="body")
    if url == EMBEDDINGS_URL and encoding_of(body) != "float":
        raise InvalidJob("in a batch, encoding_format is float", "unsupported_feature", "encoding_format")
    asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    jobs = read_jobs(url, asked)
    if len(jobs) != 1:
        raise InvalidJob("several prompts in one line are not supported", "unsupported_feature", "prompt")
    return jobs[0]


def _supported(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in FIELDS[url]:
            fields[name] = value
        elif name in ANNOTATIONS:
            if not isinstance(value, str):
                raise InvalidJob(f"{name}: Input should be a valid string", param=name)
        elif name in HINTS:
            check_hint(name, value)
        elif name == "metadata":
            check_metadata(value)
        elif name in NEUTRAL and any(type(value) is type(word) and value == word for word in NEUTRAL[name]):
            continue
        else:
            shown = name[:_MAX_SHOWN]
            what = "this value of" if name in NEUTRAL else "parameter"
            hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise InvalidJob(f"{what} {shown} is not supported{hint}", "unsupported_feature", shown)
    return fields


def check_hint(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InvalidJob(f"{name}: Input should be an object", param=name)


def check_metadata(value: Any) -> None:
    """Check OpenAI's metadata, which annotates stored completions. Raises InvalidJob."""
    is_flat = isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
    if not is_flat or sum(len(name) + len(text) for name, text in value.items()) > MAX_METADATA_BYTES:
        raise InvalidJob("metadata is an object of short texts", param="metadata")


def _prompts(given: Any) -> list[dict[str, Any]]:
    """Read a text, a list of texts, a list of token ids, or a list of such lists."""
    if given is None:
        raise InvalidJob("prompt is missing", param="prompt")
    if isinstance(given, str):
        return [{"prompt": given}]
    if isinstance(given, list) and len(given) > 0:
        if all(type(item) is int for item in given):
            return [{"prompt_token_ids": given}]
        if len(given) > MAX_PROMPTS:
            raise InvalidJob(f"at most {MAX_PROMPTS} prompts", param="prompt")
        if all(isinstance(item, str) for item in given):
            return [{"prompt": item} for item in given]
        if all(isinstance(item, list) for item in given):
            return [{"prompt_token_ids": item} for item in given]
    raise InvalidJob("prompt is a text, token ids, or a list of either", param="prompt")


def _read_echo(fields: dict[str, Any]) -> dict[str, Any]:
    """Read `echo`: the prompt precedes the output. With `max_tokens=0` it is scored, without sampling."""
    is_wanted = fields.pop("echo", False)
    if not isinstance(is_wanted, bool):
        raise InvalidJob("echo: Input should be a valid boolean", param="echo")
    if not is_wanted:
        return fields
    if fields.get("max_tokens") != 0:
        return fields | {"prompt_logprobs": fields.get("logprobs", 0)}
    return {"task": "score"} | {name: fields[name] for name in ("model", "logprobs") if name in fields}


def _read_chat_logprobs(fields: dict[str, Any]) -> None:
    """Read chat's form of logprobs: `logprobs: true` with `top_logprobs`."""
    is_wanted, top = fields.pop("logprobs", False), fields.pop("top_logprobs", None)
    if not isinstance(is_wanted, bool):
        raise InvalidJob("logprobs: Input should be a valid boolean", param="logprobs")
    if is_wanted:
        fields["logprobs"] = 0 if top is None else top
    elif top not in (None, 0):
        raise InvalidJob("top_logprobs needs logprobs: true", param="top_logprobs")


def _read_tools(fields: dict[str, Any]) -> None:
    """Drop fields without effect: no tools, choices among none, and the format of an answer next to a forced call."""
    if fields.get("tools") == []:
        del fields["tools"]
    if isinstance(choice := fields.get("tool_choice"), Mapping):
        fields["tool_choice"] = _function_of(choice, "tool_choice")
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [_function_of(tool, f"tools.{number}") for number, tool in enumerate(tools)]
    if "tools" in fields:
        if fields.get("tool_choice", "auto") not in (None, "auto", "none"):
            fields.pop("response_format", None)
        return
    if fields.get("tool_choice") in NEUTRAL["tool_choice"]:
        del fields["tool_choice"]
    if isinstance(fields.get("parallel_tool_calls"), bool):
        del fields["parallel_tool_calls"]


def _function_of(given: Any, place: str) -> Any:
    """Return a tool, or the choice of one, without nulls. Raises InvalidJob for other kinds than functions."""
    if not isinstance(given, Mapping):
        return given
    kind = given.get("type")
    if isinstance(kind, str) and kind != "function":
        raise InvalidJob(
            f"{place}.type: only functions are supported; offer a function that does it",
            "unsupported_feature",
            f"{place}.type",
        )
    return _without_nulls(given, "function")


def _without_nulls(given: Mapping[str, Any], nested: str) -> dict[str, Any]:
    """Return an object without nulls, and without those of its member `nested`."""
    cleaned = {name: value for name, value in given.items() if value is not None}
    if isinstance(inner := cleaned.get(nested), Mapping):
        cleaned[nested] = {name: value for name, value in inner.items() if value is not None}
    return cleaned


def _read_open_turns(fields: dict[str, Any]) -> None:
    """Convert fields for the end of the prompt, if they are not the default, to variables of the chat template."""
    given = {name: fields.pop(name) for name in OPEN_TURNS if name in fields}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InvalidJob(f"{name}: Input should be a valid boolean", param=name)
    if all(given.get(name) for name in OPEN_TURNS):
        raise InvalidJob("continue_final_message needs add_generation_prompt false", param=OPEN_TURNS[1])
    variables = fields.get("chat_template_kwargs", {})
    changed = {name: value for name, value in given.items() if value is not (name == OPEN_TURNS[0])}
    if changed and isinstance(variables, Mapping):
        fields["chat_template_kwargs"] = {**variables, **changed}


def _message(number: int, message: Any) -> Any:
    """Join text parts, and treat the role `developer` as `system`. Parts other than texts and images are rejected."""
    if not isinstance(message, Mapping):
        return message
    # Clients return earlier answers unchanged, with their empty fields.
    cleaned = {name: value for name, value in message.items() if value not in (None, [])}
    if cleaned.get("role") == "assistant":
        cleaned = _without(cleaned, _ANSWER_MEMBERS)
        if isinstance(calls := cleaned.get("tool_calls"), list):
            cleaned["tool_calls"] = [_call(call) for call in calls]
        if isinstance(cleaned.get("refusal"), str):
            cleaned.setdefault("content", cleaned.pop("refusal"))  # it is the assistant's answer
        if cleaned.get("content") is None and "tool_calls" not in cleaned:
            cleaned["content"] = ""  # an answer with only reasoning
    if cleaned.get("role") == "developer":
        cleaned["role"] = "system"
    if "reasoning_content" in cleaned:
        cleaned.setdefault("reasoning", cleaned.pop("reasoning_content"))
    if isinstance(parts := cleaned.get("content"), list):
        cleaned["content"] = _content(parts, f"messages.{number}.content")
    return cleaned


def _call(call: Any) -> Any:
    """Return a tool call of an earlier answer without members that calls in requests do not have."""
    if not isinstance(call, Mapping):
        return call
    cleaned = _without(_without_nulls(call, "function"), _CALL_MEMBERS)
    if isinstance(function := cleaned.get("function"), Mapping):
        cleaned["function"] = _without(function, _FUNCTION_MEMBERS)
    return cleaned


def _without(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


_ANSWER_MEMBERS = (
    "parsed", "id", "annotations", "weight", "provider_specific_fields", "thinking_blocks", "reasoning_items",
    "reasoning_details", "cache_control",
)  # fmt: skip
"""Members of an assistant's message that do not affect the output; clients such as openai and LiteLLM add them."""
_CALL_MEMBERS = ("index", "provider_specific_fields", "extra_content", "caller")
_FUNCTION_MEMBERS = ("parsed_arguments",)


def _content(parts: list[Any], place: str) -> str | list[dict[str, Any]]:
    """Return texts as one text, and texts with images as a job's parts. Raises InvalidJob for others."""
    found: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text), **rest} | {
                "type": "refusal",
                "refusal": str(text),
                **rest,
            }:
                check_members(rest, _PART_MEMBERS, place)
                found.append({"type": "text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url), **more}, **rest}:
                check_members(rest, _PART_MEMBERS, place)
                check_members(more, ("detail",), f"{place}.image_url")
                found.append(image_part(url))
            case _:
                raise InvalidJob(f"{place}: {not_supported(parts)}", "unsupported_feature", place)
    return joined_parts(found)


_PART_MEMBERS = ("cache_control", "prompt_cache_breakpoint")
"""Members of a part that do not affect the output."""


def check_members(rest: Mapping[Any, Any], known: Collection[str], place: str) -> None:
    """Check the members of an object. Raises InvalidJob for an unknown member that is set."""
    for name, value in rest.items():
        if value is not None and name not in known:
            shown = f"{place}.{str(name)[:_MAX_SHOWN]}"
            raise InvalidJob(f"{shown} is not supported", "unsupported_feature", shown)


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def joined_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a job's parts, as one text if there is no image."""
    has_images = any(part["type"] == "image_url" for part in parts)
    return parts if has_images else "".join(part["text"] for part in parts)


_MEDIA = {
    "input_audio": "audio",
    "video_url": "video",
    "file": "a file",
    "input_file": "a file",
}
"""Types of a message's parts that no model reads."""


def not_supported(parts: Any, supported: str = "texts and images are") -> str:
    """Return why a message's content is not supported, by the type of the first unsupported part."""
    kinds = (
        (part.get("type") for part in parts if isinstance(part, Mapping)) if isinstance(parts, list) else ()
    )
    named = next((_MEDIA[kind] for kind in kinds if isinstance(kind, str) and kind in _MEDIA), None)
    return (
        f"only {supported} supported" if named is None else f"{named} is not supported yet, only {supported}"
    )


def is_chat(url: str) -> bool:
    return url == CHAT_URL


def completion_id(url: str, name: str) -> str:
    return f"{'chatcmpl' if is_chat(url) else 'cmpl'}-{name}"


def completion(
    url: str, name: str, *, created: int, model: str, choices: Sequence[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    """Return the complete response to a request."""
    return {
        "id": completion_id(url, name),
        "object": "chat.completion" if is_chat(url) else "text_completion",
        "created": created,
        "model": model,
        "choices": list(choices),
        "usage": usage_body(usage),
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def total_usage(parts: Iterable[Usage]) -> Usage:
    """Return the summed usage of a request with several prompts."""
    found = list(parts)
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in found),
        completion_tokens=sum(part.completion_tokens for part in found),
        cached_tokens=sum(part.cached_tokens for part in found),
        reasoning_tokens=sum(thoughts) if (thoughts := _known(found)) else None,
    )


def _known(usages: list[Usage]) -> list[int]:
    return [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]


def choices(url: str, result: Result, prompt: str | None = None, first: int = 0) -> list[dict[str, Any]]:
    """Return the samples of a complete response, numbered from `first`.

    The prompt precedes each if the result has its log-probabilities, as with `echo`. `prompt`: its text, if known.
    """
    made = [_choice(url, sample, first + sample.index) for sample in result.outputs]
    if result.prompt_logprobs is None or is_chat(url):
        return made
    before = tuple(position for position in result.prompt_logprobs if position is not None)
    if prompt is None:
        prompt = joined_text(before)
    for sample, body in zip(result.outputs, made, strict=True):
        body["text"] = prompt + sample.text
        if sample.logprobs is not None:
            body["logprobs"] = logprobs_body(url, before + sample.logprobs)
    return made


def _choice(url: str, sample: Output, index: int) -> dict[str, Any]:
    return {
        "index": index,
        **({"message": _answer(sample)} if is_chat(url) else {"text": sample.text}),
        "logprobs": logprobs_body(url, sample.logprobs),
        "finish_reason": "length" if is_scored(sample) else finish_reason(sample),
        **({} if sample.label is None else {"label": sample.label, "label_probs": sample.label_probs}),
    }


def is_scored(sample: Output) -> bool:
    """Return True for scored tokens, as `echo` with `max_tokens` 0 returns them."""
    return sample.logprob is not None and sample.label is None


def finish_reason(sample: Output) -> str:
    """Return OpenAI's reason; for an answer with calls it is `tool_calls`, even if the call was forced."""
    if sample.tool_calls and sample.finish_reason == "stop":
        return "tool_calls"
    return sample.finish_reason or "stop"


def _answer(sample: Output) -> dict[str, Any]:
    """Return the message of a sample. The reasoning is in both fields that clients of vLLM read."""
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
    if sample.tool_calls:
        message["content"] = sample.text or None
        message["tool_calls"] = [call.message_dict() for call in sample.tool_calls]
    if sample.reasoning is not None:
        message |= reasoning_body(sample.reasoning)
    return message


def reasoning_body(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}


def logprobs_body(
    url: str, positions: Sequence[PositionLogprobs] | None, offset: int = 0
) -> dict[str, Any] | None:
    """Return log probabilities of successive tokens; `offset`: characters of the output before them."""
    if positions is None:
        return None
    if is_chat(url):
        content = [{**_token(p.chosen), "top_logprobs": [_token(t) for t in p.top]} for p in positions]
        return {"content": content, "refusal": None}
    chosen = [position.chosen for position in positions]
    return {
        "tokens": [token.text for token in chosen],
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": [{t.text: _certain(t.logprob) for t in p.top} for p in positions],
        "text_offset": _offsets([token_bytes(token) for token in chosen], offset),
    }


def _offsets(tokens: list[bytes], at: int) -> list[int]:
    """Return each token's start in characters; a token that completes a character has the same start as it."""
    offsets, decoder = [], getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        offsets.append(at)
        at += len(decoder.decode(token))
    return offsets


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token_bytes(token)), "logprob": _certain(token.logprob)}


def is_part_of_character(token: TokenLogprob) -> bool:
    """Return whether the token's text represents bytes."""
    return _SPELLED.fullmatch(token.text) is not None


def token_bytes(token: TokenLogprob) -> bytes:
    """Return a token's bytes: its text's, or those that the text represents if it is part of a character."""
    if is_part_of_character(token):
        return bytes.fromhex(token.text.removeprefix("bytes:").replace("\\x", ""))
    return token.text.encode()


def joined_text(positions: Iterable[PositionLogprobs]) -> str:
    """Return the text of successive tokens, including special ones."""
    return b"".join(token_bytes(position.chosen) for position in positions).decode(errors="replace")


def _certain(logprob: float | None) -> float:
    """Return 0 for None: OpenAI's field is always a number, and a forced token is certain."""
    return 0.0 if logprob is None else logprob


def parse_job(fields: dict[str, Any]) -> Job:
    """Like Job.parse, with OpenAI's field names in errors. Raises InvalidJob."""
    try:
        return Job.parse(fields)
    except InvalidJob as error:
        if error.param is not None and error.param.startswith("prompt_token_ids"):
            error.param = "prompt"
        if error.param is not None and error.param.startswith("inputs"):
            error.param = "input"
        raise
