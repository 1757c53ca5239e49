"""Anthropic's Messages API: requests converted to chats, results written as messages.

Format: the API's reference, "Messages". Thinking has no signature: clients return it unchanged, and any is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pagemill.producer.openai.formats import image_part, joined_parts
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_MESSAGES
from pagemill.producer.wire.schema.outputs import Output, Result, Usage

MESSAGES_URL = "/v1/messages"
COUNT_TOKENS_URL = "/v1/messages/count_tokens"
THREAD = "thread"
MAX_BLOCKS = 1024
"""Maximum content blocks of one message."""
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_READ = frozenset(
    {
        *_SAME,
        "messages",
        "system",
        "stop_sequences",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "metadata",
    }
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    # The client decides which reasoning of earlier turns it sends.
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}
_WITHOUT_EFFECT = frozenset({"cache_control"})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Text that Claude Code puts before its system text. It differs in every request, so no prefix would be cached."""


def read_message(body: Mapping[str, Any], *, is_count: bool = False) -> dict[str, Any]:
    """Return the body of the chat completion for a message request. Raises InvalidJob.

    Args:
        is_count: The request counts tokens; it has no `max_tokens`.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if "thread" in given:  # clients then continue without threads
        raise InvalidJob("thread is not supported; send all messages", "unsupported_feature", THREAD)
    for name, value in given.items():
        if name in _READ or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        what = "this value of" if name in _NEUTRAL else "parameter"
        raise InvalidJob(f"{what} {name[:64]} is not supported", "unsupported_feature", name[:64])
    if "max_tokens" not in given and not is_count:
        raise InvalidJob("max_tokens is required", param="max_tokens")
    chat: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    messages = list(_messages(given))
    chat |= {"messages": messages, "separate_reasoning": True}
    match messages[-1:]:
        case [{"role": "assistant", "content": begun, **rest}] if begun and "tool_calls" not in rest:
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
    if given.get("tools"):
        chat["tools"] = [_tool(number, tool) for number, tool in enumerate(_list(given["tools"], "tools"))]
    choice = _tool_choice(given.get("tool_choice"))
    if "tools" in chat:
        chat |= choice
    elif choice.get("tool_choice") not in (None, "auto", "none"):
        raise InvalidJob("tool_choice: a forced call needs tools", param="tool_choice")
    chat |= _thinking(given.get("thinking"))
    chat |= _output_config(given.get("output_config"))
    return chat


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidJob(f"{place} should be a list", param=place)
    return value


def _unsupported(place: str, problem: str) -> InvalidJob:
    return InvalidJob(f"{place}: {problem}", "unsupported_feature", place)


def _messages(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if system := _BILLING.sub("", _text(_without_billing(given.get("system", "")), "system")):
        yield {"role": "system", "content": system}
    messages = _list(given.get("messages"), "messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidJob(f"messages should have 1 to {MAX_MESSAGES} items", param="messages")
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        match message:
            case {"role": "assistant", "content": content}:
                yield _assistant(content, f"{place}.content")
            case {"role": "user" | "system" as role, "content": content}:
                yield from _turns(role, content, f"{place}.content")
            case _:
                raise InvalidJob(f"{place} should have a role, user or assistant, and content", param=place)


def _without_billing(system: Any) -> Any:
    """Return a system text without a first block for billing."""
    match system:
        case [{"type": "text", "text": str(text)}, *rest] if _BILLING.match(text):
            return rest
    return system


def _blocks(content: Any, place: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise InvalidJob(f"{place} should be a text or a list of blocks", param=place)
    if len(content) > MAX_BLOCKS:
        raise InvalidJob(f"{place} should have at most {MAX_BLOCKS} blocks", param=place)
    return content


def _text(content: Any, place: str) -> str:
    texts = []
    for number, block in enumerate(_blocks(content, place)):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _refused_block(block, f"{place}.{number}")
        texts.append(block["text"])
    return "".join(texts)


def _refused_block(block: Mapping[str, Any], place: str) -> InvalidJob:
    kind = block.get("type")
    if kind == "document":
        return _unsupported(place, "documents are not supported yet")
    if kind == "image":
        return _unsupported(place, "an image must be in a user's message, with a base64 or url source")
    return _unsupported(place, "only text, images, tool calls, their results and thinking are supported")


def _image(source: Any) -> dict[str, Any] | None:
    """Return the source of an image as a job's part; None for other kinds of sources."""
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return image_part(f"data:{kind};base64,{data}")
        case {"type": "url", "url": str(url)}:
            return image_part(url)
    return None


def _turns(role: str, content: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yield the results of tools as separate turns, before and after the user's texts and images."""
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(_blocks(content, place)):
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": source} if (image := _image(source)) is not None:
                parts.append(image)
            case {"type": "tool_result", "tool_use_id": str(name), **rest}:
                if parts:
                    yield {"role": role, "content": joined_parts(parts)}
                    parts = []
                result = _text(rest.get("content") or "", f"{place}.{number}.content")
                yield {"role": "tool", "tool_call_id": name, "content": result}
            case _:
                raise _refused_block(block, f"{place}.{number}")
    if parts or isinstance(content, str):
        yield {"role": role, "content": joined_parts(parts)}


def _assistant(content: Any, place: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    thinking: list[str] = []
    for number, block in enumerate(_blocks(content, place)):
        match block:
            case {"type": "text", "text": str(text)}:
                turn["content"] += text
            case {"type": "tool_use", "id": str(name), "name": str(function), "input": dict(arguments)}:
                call = {"name": function, "arguments": json.dumps(arguments, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": call})
            case {"type": "thinking", "thinking": str(text)}:
                thinking.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                raise _refused_block(block, f"{place}.{number}")
    if any(thinking):
        turn["reasoning"] = "".join(thinking)
    return turn


def _tool(number: int, tool: Any) -> dict[str, Any]:
    match tool:
        case {"name": name, "input_schema": schema, **rest} if rest.get("type") in (None, "custom"):
            function = {"name": name, "parameters": schema}
            function |= {
                field: rest[field] for field in ("description", "strict") if rest.get(field) is not None
            }
            return {"type": "function", "function": function}
    raise _unsupported(f"tools.{number}", "only functions with name and input_schema are supported")


def _tool_choice(choice: Any) -> dict[str, Any]:
    match choice:
        case None:
            return {}
        case {"type": "tool", "name": name, **rest}:
            found: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": name}}}
        case {"type": str(kind), **rest} if kind in _CHOICES:
            found = {"tool_choice": _CHOICES[kind]}
        case _:
            raise InvalidJob("tool_choice should have type auto, any, tool or none", param="tool_choice")
    if rest.get("disable_parallel_tool_use") is True:
        found["parallel_tool_calls"] = False
    return found


def _thinking(thinking: Any) -> dict[str, Any]:
    match thinking:
        case None | {"type": "adaptive"}:
            return {}
        case {"type": "disabled"}:
            return {"reasoning_effort": "none"}
        case {"type": "enabled", "budget_tokens": budget}:
            return {"thinking_token_budget": budget}
    raise InvalidJob(
        "thinking should have type enabled, with budget_tokens, adaptive or disabled", param="thinking"
    )


def _output_config(config: Any) -> dict[str, Any]:
    match config:
        case None:
            return {}
        case {**fields} if set(fields) <= {"effort", "format"}:
            pass
        case _:
            raise _unsupported("output_config", "only effort and format are supported")
    found: dict[str, Any] = {}
    if (effort := fields.get("effort")) is not None:
        found["reasoning_effort"] = effort
    match fields.get("format"):
        case None:
            pass
        case {"type": "json_schema", "schema": schema}:
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case _:
            raise InvalidJob(
                "output_config.format should have type json_schema and schema", param="output_config"
            )
    return found


_UNUSED_USAGE = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use")
"""Members that Anthropic's schema requires; null here."""


def message_id(job_id: str) -> str:
    return f"msg_{job_id}"


def message(model: str, job_id: str, result: Result | None = None) -> dict[str, Any]:
    """Return the message of a job, or without its result the message at the start of a stream."""
    output = None if result is None else result.outputs[0]
    return {
        "id": message_id(job_id),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [] if output is None else list(_content(output)),
        "stop_reason": None if output is None else stop_reason(output),
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": usage_body(Usage() if result is None else result.usage),
    }


def _content(output: Output) -> Iterator[dict[str, Any]]:
    if output.reasoning is not None:
        yield block("reasoning") | {"thinking": output.reasoning}
    if output.text or not (output.tool_calls or output.reasoning is not None):
        yield block("content") | {"text": output.text}
    for call in output.tool_calls:
        yield block(0, call.id, call.function.name) | {"input": _arguments(call.function.arguments)}


def block(part: str | int, call_id: str = "", name: str = "") -> dict[str, Any]:
    """Return an empty content block: of `reasoning`, of `content`, or of the call with a number."""
    match part:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "content":
            return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; only forced and strict calls certainly have an object, others are wrapped."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"arguments": text}
    return found if isinstance(found, dict) else {"arguments": found}


def stop_reason(output: Output) -> str:
    if output.finish_reason == "length":  # the last call can be incomplete
        return "max_tokens"
    return "tool_use" if output.tool_calls else "end_turn"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the tokens. Unlike OpenAI's, input tokens do not include those from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        **dict.fromkeys(_UNUSED_USAGE),
        "service_tier": "standard",
    }


def model_object(name: str, created: int) -> dict[str, Any]:
    """Return a model in Anthropic's format. `created`: Unix seconds."""
    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}
