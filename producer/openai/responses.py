"""OpenAI's Responses API without stored state: a request read as a chat's, results written as responses.

Format: the API's reference, "Responses". Nothing is stored, so a conversation is sent whole each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.producer.openai.formats import ANNOTATIONS
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.outputs import Output, Result, Usage

RESPONSES_URL = "/v1/responses"
MAX_ITEMS = 1024
_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "metadata", *sorted(ANNOTATIONS))
_READ = frozenset(
    {*_SAME, "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning"}
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}
_INSTEAD: Mapping[str, str] = {
    "store": "nothing is stored here: send false, and the whole conversation each time",
    "previous_response_id": "send the earlier input and output items in input",
    "conversation": "send the earlier input and output items in input",
    "prompt": "send the prompt's text in instructions and input",
    "background": "submit a job to the queue, or a batch",
    "truncation": "shorten the input",
    "top_logprobs": "use /v1/chat/completions, which has logprobs",
    "include": "everything there is comes by itself",
    "max_tool_calls": "use parallel_tool_calls false for one call",
    "stream_options": "usage is in the last event",
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat completion that a request for a response stands for. Raises InvalidJob."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _READ or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        shown = name[:64]
        hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        what = "this value of" if name in _NEUTRAL else "parameter"
        raise InvalidJob(f"{what} {shown} is not supported{hint}", "unsupported_feature", shown)
    chat: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    chat |= {"messages": _messages(given), "separate_reasoning": True}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if "tools" in given:
        chat["tools"] = _tools(given["tools"])
    if "tool_choice" in given:
        chat["tool_choice"] = _choice(given["tool_choice"])
    if (form := _format(given.get("text"))) is not None:
        chat["response_format"] = form
    if (effort := _effort(given.get("reasoning"))) is not None:
        chat["reasoning_effort"] = effort
    return chat


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "instructions" in given:
        messages.append({"role": "system", "content": given["instructions"]})
    items = given.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise InvalidJob(f"input is a text, or 1 to {MAX_ITEMS} items", param="input")
    for number, item in enumerate(items):
        _add(messages, f"input.{number}", item)
    return messages


def _add(messages: list[dict[str, Any]], place: str, item: Any) -> None:
    """Add an item to the messages; those that make up one turn of the assistant become one message."""
    match item:
        case {"type": "function_call", "call_id": str(name), "name": function, "arguments": arguments}:
            call = {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
            turn = _assistant(messages, "content_follows")
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case {"type": "function_call_output", "call_id": str(name), "output": output}:
            messages.append(
                {"role": "tool", "tool_call_id": name, "content": _text(output, f"{place}.output")}
            )
        case {"type": "reasoning"}:
            told = _text(item.get("content") or item.get("summary") or [], place)
            _assistant(messages, "reasoning")["reasoning"] = told or None
        case {"role": "assistant", "content": content, **rest} if rest.get("type", "message") == "message":
            _assistant(messages, "content")["content"] = _text(content, f"{place}.content")
        case {"role": str(role), "content": content, **rest} if rest.get("type", "message") == "message":
            messages.append({"role": role, "content": _text(content, f"{place}.content")})
        case {"type": "item_reference"}:
            raise InvalidJob(
                f"{place}: nothing is stored here; send the item itself", "unsupported_feature", place
            )
        case _:
            raise InvalidJob(
                f"{place}: only messages, function calls, their outputs and reasoning are supported",
                "unsupported_feature",
                place,
            )


def _assistant(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """Return the assistant's turn that an item's part belongs to: the last message, or a new one."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and part not in last
    if is_open and not (part in ("reasoning", "content") and "tool_calls" in last):
        return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise InvalidJob(f"{place}: only text content is supported", "unsupported_feature", place)


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Read the flat form of functions. Calls are strict unless it says otherwise."""
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


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case str():
            return choice
    raise InvalidJob(
        "tool_choice is none, auto, required or a function", "unsupported_feature", "tool_choice"
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
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return form
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    raise InvalidJob(
        "text.format has type text, json_object or json_schema (with schema)", param="text.format"
    )


def _effort(reasoning: Any) -> Any:
    match reasoning:
        case None:
            return None
        case {**rest} if set(rest) <= {"effort", "summary"}:
            if rest.get("summary") in (None, "auto"):
                return rest.get("effort")
    raise InvalidJob(
        "reasoning: only effort is supported; the thinking itself is in the output",
        "unsupported_feature",
        "reasoning",
    )


def response_id(job_id: str) -> str:
    return f"resp_{job_id}"


def items(job_id: str, output: Output) -> list[dict[str, Any]]:
    """Return the output items of a sample: its thinking, its text, and its calls."""
    status = "incomplete" if output.finish_reason == "length" else "completed"
    found: list[dict[str, Any]] = []
    if output.reasoning is not None:
        found.append(reasoning_item(job_id, output.reasoning, status))
    if output.text or not output.tool_calls:
        found.append(message_item(job_id, output.text, status))
    for call in output.tool_calls:
        found.append(call_item(call.id, call.function.name, call.function.arguments, status))
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
    asked: Mapping[str, Any], job_id: str, created: int, result: Result | None = None
) -> dict[str, Any]:
    """Return the response to a request, finished with `result`, or in progress without."""
    is_cut = result is not None and result.finish_reason == "length"
    status = "in_progress" if result is None else "incomplete" if is_cut else "completed"
    return {
        "id": response_id(job_id),
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "model": asked.get("model"),
        "output": [] if result is None else items(job_id, result.outputs[0]),
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (asked.get("reasoning") or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": asked.get("temperature"),
        "text": {"format": (asked.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_p": asked.get("top_p"),
        "truncation": "disabled",
        "usage": None if result is None else usage_body(result.usage),
        "metadata": asked.get("metadata") or {},
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
