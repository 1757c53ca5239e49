"""OpenAI's Responses API: requests converted to chats, results written as responses.

Format: the API's reference, "Responses". A response is stored only if its request sets `store` or `background`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.producer.openai.formats import (
    ANNOTATIONS,
    HINTS,
    check_hint,
    check_members,
    image_part,
    joined_parts,
    not_supported,
    read_bound,
)
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.outputs import Output, Result, Usage

RESPONSES_URL = "/v1/responses"
INPUT_TOKENS_URL = "/v1/responses/input_tokens"
MAX_ITEMS = 1024
_PREFIX = "resp_"
_PENALTIES = ("presence_penalty", "frequency_penalty")
_SAME = (
    *("model", "temperature", "top_p", *_PENALTIES, "parallel_tool_calls", "stream", "metadata"),
    "ignore_eos",
    *sorted(ANNOTATIONS),
)
_READ = frozenset(
    {
        *_SAME, "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning",
        "previous_response_id",
    }
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (True, False),
    "background": (True, False),
    # Reasoning is plain text, which clients may return unchanged: there is nothing to encrypt.
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default", "flex"),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
_WITH_OPTIONS = frozenset({"reasoning", "stream_options", "text"})
"""Objects whose members can be null, as if they were omitted."""
_INSTEAD: Mapping[str, str] = {
    "conversation": "send previous_response_id, or the earlier items in input",
    "prompt": "send the prompt's text in instructions and input",
    "truncation": "shorten the input",
    "top_logprobs": "use /v1/chat/completions, which has logprobs",
    "include": "use /v1/chat/completions for log-probabilities; tools of a server do not exist here",
    "max_tool_calls": "use parallel_tool_calls false for one call",
    "stream_options": "usage is in the last event",
}
_ITEM = ("id", "status")
"""Members of an item that do not affect the output: clients return items of earlier responses unchanged."""
_PART = ("annotations", "logprobs", "parsed", "cache_control", "prompt_cache_breakpoint")
"""The same for a part of a message."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read_response(body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the body of the chat completion for a response request. Raises InvalidJob.

    Args:
        earlier: messages of the conversation that `previous_response_id` continues.
    """
    given = {
        name: _without_nulls(value) if name in _WITH_OPTIONS else value
        for name, value in body.items()
        if value is not None
    }
    for name in HINTS & given.keys():
        check_hint(name, given.pop(name))
    for name, value in given.items():
        if name in _READ or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        shown = name[:64]
        hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        what = "this value of" if name in _NEUTRAL else "parameter"
        raise InvalidJob(f"{what} {shown} is not supported{hint}", "unsupported_feature", shown)
    chat: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    chat |= {"messages": _messages(given, earlier), "separate_reasoning": True}
    if (most := read_bound(given, "max_output_tokens")) is not None:
        chat["max_tokens"] = most
    if "tools" in given:
        chat["tools"] = _tools(given["tools"])
    if "tool_choice" in given:
        chat["tool_choice"] = _choice(given["tool_choice"])
    is_forced = chat.get("tool_choice") not in (None, "none", "auto")
    if (form := _format(given.get("text"))) is not None and not is_forced:
        # Some clients send the format of an answer in addition to a forced call, which has no answer.
        chat["response_format"] = form
    if (effort := _effort(given.get("reasoning"))) is not None:
        chat["reasoning_effort"] = effort
    return chat


def _without_nulls(options: Any) -> Any:
    if not isinstance(options, Mapping):
        return options
    return {name: value for name, value in options.items() if value is not None}


def _messages(given: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "instructions" in given:
        if not isinstance(given["instructions"], str):
            raise InvalidJob("instructions: Input should be a valid string", param="instructions")
        messages.append({"role": "system", "content": given["instructions"]})
    messages += map(dict, earlier)
    items = given.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise InvalidJob(f"input is a text, or 1 to {MAX_ITEMS} items", param="input")
    for number, item in enumerate(items):
        _add(messages, f"input.{number}", item)
    return messages


def _add(messages: list[dict[str, Any]], place: str, item: Any) -> None:
    """Add an item to the messages; items of one turn of the assistant become one message."""
    match item:
        case {
            "type": "function_call",
            "call_id": str(name),
            "name": function,
            "arguments": arguments,
            **rest,
        }:
            check_members(rest, (*_ITEM, "parsed_arguments"), place)
            call = {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
            turn = _assistant(messages, "content_follows")
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case {"type": "function_call_output", "call_id": str(name), "output": output, **rest}:
            check_members(rest, (*_ITEM, "name"), place)
            messages.append(
                {"role": "tool", "tool_call_id": name, "content": _text(output, f"{place}.output")}
            )
        case {"type": "reasoning", **rest}:
            check_members(rest, (*_ITEM, "content", "summary", "encrypted_content"), place)
            thought = _text(item.get("content") or item.get("summary") or [], place)
            _assistant(messages, "reasoning")["reasoning"] = thought or None
        case {"role": "assistant", "content": content, **rest} if rest.get("type", "message") == "message":
            check_members(rest, (*_ITEM, "type", "phase"), place)
            _assistant(messages, "content")["content"] = _text(content, f"{place}.content")
        case {"role": str(role), "content": content, **rest} if rest.get("type", "message") == "message":
            check_members(rest, (*_ITEM, "type", "phase"), place)
            messages.append({"role": role, "content": _content(content, f"{place}.content")})
        case {"type": "item_reference"}:
            raise InvalidJob(
                f"{place}: items are not stored one by one; send the item itself (clients do with store: false)",
                "unsupported_feature",
                place,
            )
        case _:
            raise InvalidJob(
                f"{place}: only messages, function calls, their outputs and reasoning are supported",
                "unsupported_feature",
                place,
            )


def _assistant(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """Return the assistant's turn to which an item's part belongs: the last message, or a new one."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and part not in last
    if is_open and not (part in ("reasoning", "content") and "tool_calls" in last):
        return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": str(kind), "text": str(text), **rest} if kind in _TEXTS:
                check_members(rest, _PART, place)
            case {"type": "refusal", "refusal": str(text), **rest}:
                check_members(rest, _PART, place)
            case _:
                break
        texts.append(text)
    else:
        return "".join(texts)
    raise InvalidJob(f"{place}: {not_supported(content, 'text content is')}", "unsupported_feature", place)


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Return a message's content, with images as a job's parts. Raises InvalidJob."""
    if not isinstance(content, list):
        return _text(content, place)
    parts: list[dict[str, Any]] = []
    for part in content:
        match part:
            case {"type": "input_image", "image_url": str(url), **rest}:
                check_members(rest, (*_PART, "detail"), place)
                parts.append(image_part(url))
            case {"type": str(kind), "text": str(text), **rest} if kind in _TEXTS:
                check_members(rest, _PART, place)
                parts.append({"type": "text", "text": text})
            case _:
                raise InvalidJob(f"{place}: {not_supported(content)}", "unsupported_feature", place)
    return joined_parts(parts)


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Read the flat form of functions. Calls are strict unless it sets otherwise."""
    if not isinstance(tools, list):
        raise InvalidJob("tools: Input should be a list", param="tools")
    found = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidJob(
                f"tools.{number}: only functions are supported; offer a function that does it",
                "unsupported_feature",
                "tools",
            )
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        # As in the API, where strict is the default; null means the same.
        found.append({"type": "function", "function": {"strict": True, **function}})
    return found


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function with all fields of the specification, even if the request omitted some."""
    return {"type": "function", "description": None, "parameters": None, "strict": True} | {
        name: value for name, value in tool.items() if value is not None
    }


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name, **rest}:
            check_members(rest, (), "tool_choice")
            return {"type": "function", "function": {"name": name}}
        case str():
            return choice
    raise InvalidJob(
        "tool_choice should be none, auto, required or a function", "unsupported_feature", "tool_choice"
    )


def _format(text: Any) -> Any:
    match text:
        case None:
            return None
        case {**rest} if set(rest) <= {"format", "verbosity"} and rest.get("verbosity") in (None, "medium"):
            form = rest.get("format")
        case _:
            raise InvalidJob("text: only format is supported", "unsupported_feature", "text")
    match form:
        case None:
            return None
        case {"type": "text", **rest}:
            check_members(rest, (), "text.format")
            return None
        case {"type": "json_object"}:
            return form
        case {"type": "json_schema", "schema": schema, **rest}:
            check_members(rest, ("name", "description", "strict"), "text.format")
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    raise InvalidJob(
        "text.format has type text, json_object or json_schema (with schema)", param="text.format"
    )


def _effort(reasoning: Any) -> Any:
    match reasoning:
        case None:
            return None
        case {**rest} if set(rest) <= {"effort", "summary", "generate_summary"}:
            summaries = (rest.get("summary"), rest.get("generate_summary"))
            if all(summary in (None, "auto", "concise", "detailed") for summary in summaries):
                return rest.get("effort")
    raise InvalidJob(
        "reasoning: only effort is supported; the thinking itself is in the output",
        "unsupported_feature",
        "reasoning",
    )


def response_id(job_id: str) -> str:
    return f"{_PREFIX}{job_id}"


def job_id_of(response_id: str) -> str:
    """Return the id of a response's job; without the prefix of responses, an id that no job has."""
    return response_id.removeprefix(_PREFIX) if response_id.startswith(_PREFIX) else ""


def items(job_id: str, output: Output) -> list[dict[str, Any]]:
    """Return the output items of a sample: its reasoning, its text, and its calls."""
    found: list[dict[str, Any]] = []
    if output.reasoning is not None:
        found.append(reasoning_item(job_id, output.reasoning, "completed"))
    if output.text or not (found or output.tool_calls):
        found.append(message_item(job_id, output.text, "completed"))
    for call in output.tool_calls:
        found.append(call_item(call.id, call.function.name, call.function.arguments, "completed"))
    if output.finish_reason == "length":
        found[-1]["status"] = "incomplete"
    return found


def reasoning_item(job_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{job_id}", "type": "reasoning", "summary": [], "content": content, "status": status}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(job_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [text_part(text)]
    return {
        "id": f"msg_{job_id}",
        "type": "message",
        "role": "assistant",
        "content": content,
        "status": status,
    }


def call_item(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": call_id.replace("call_", "fc_"),
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def response(
    asked: Mapping[str, Any],
    job_id: str,
    created: int,
    result: Result | None = None,
    *,
    status: str = "in_progress",
    completed: float | None = None,
    error: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the response to a request.

    Args:
        created: Unix seconds.
        result: of a job that succeeded.
        status: of a job without a result.
        completed: Unix seconds; None: now.
        error: `code` and `message` of a job that did not succeed.
    """
    is_cut = result is not None and result.finish_reason == "length"
    if result is not None:
        status = "incomplete" if is_cut else "completed"
    return {
        "id": response_id(job_id),
        "object": "response",
        "created_at": created,
        "completed_at": int(completed or time.time()) if status == "completed" else None,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "model": asked.get("model"),
        "output": [] if result is None else items(job_id, result.outputs[0]),
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "previous_response_id": asked.get("previous_response_id"),
        "reasoning": {"effort": (asked.get("reasoning") or {}).get("effort"), "summary": None},
        "store": is_stored(asked),
        "background": asked.get("background") is True,
        "service_tier": "flex" if asked.get("service_tier") == "flex" else "default",
        "max_tool_calls": None,
        "top_logprobs": 0,
        "safety_identifier": asked.get("safety_identifier"),
        "prompt_cache_key": asked.get("prompt_cache_key"),
        **{name: asked.get(name) or 0.0 for name in _PENALTIES},
        "temperature": 1.0 if asked.get("temperature") is None else asked["temperature"],
        "text": {"format": (asked.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": [_shown_tool(tool) for tool in asked.get("tools") or []],
        "top_p": 1.0 if asked.get("top_p") is None else asked["top_p"],
        "truncation": "disabled",
        "usage": None if result is None else usage_body(result.usage),
        "metadata": asked.get("metadata") or {},
    }


def is_stored(asked: Mapping[str, Any]) -> bool:
    """Return whether the response can be retrieved later. Raises InvalidJob for `background` without `store`."""
    if asked.get("background") is True and asked.get("store") is False:
        raise InvalidJob("background needs store: true", param="store")
    return asked.get("background") is True or asked.get("store") is True


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
