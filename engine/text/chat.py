"""Chats with tools and reasoning: the prompt, the structure of forced calls, and the parsing of outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any, Literal

from pagemill.common.bounds import InvalidParameter
from pagemill.common.chat.families import (
    PLUGINS,
    TOOLS,
    ToolSyntax,
    detect_tools,
    find_tools,
    unsupported_family,
    writes_call,
)
from pagemill.common.chat.syntax import ChatSyntax
from pagemill.common.chat.thinking import HARMONY, THINKING, ThinkingTags, detect_thinking
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import InvalidRequest, UnsupportedFeature
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Generate, Outline, Thinking
from pagemill.engine.text.call_grammar import CallGrammar, Function, is_text_schema, normalized
from pagemill.engine.text.chat_template import CONTINUE
from pagemill.engine.text.harmony_turns import harmony_turns
from pagemill.engine.text.numbered_calls import number_calls
from pagemill.engine.text.tokenizer import Message, Tokenizer

_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates turn reasoning on or off."""
_TRIAL_NAME, _TRIAL_KEY = "trial_function", "trial_key"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MAX_NAMES = 16384
"""Maximum length of parameters' names, which every output's record contains for syntaxes without types."""
_EXPLANATION = """You can call these functions:
{tools}

To call one, answer with one line of JSON and nothing else: {{"name": "...", "arguments": {{...}}}}"""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a chat in addition to its messages; tools and messages are in OpenAI's form."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    function: str | None = None
    """The one function to call; `choice` is required then."""
    is_parallel: bool | None = None
    """Whether several calls are allowed. None: several if calls are optional, one if a call is required."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def offered(self) -> list[Function]:
        """The functions that the model can call. Raises InvalidRequest if a call is required and there are none."""
        if self.choice == "none":
            return []
        try:
            functions = [Function.from_definition(tool["function"]) for tool in self.tools]
        except (KeyError, TypeError):
            raise InvalidRequest(
                "tools: give functions in OpenAI's form: type, and function with a name"
            ) from None
        offered = [one for one in functions if self.function in (None, one.name)]
        if self.choice == "required" and not offered:
            raise InvalidRequest(f"tool_choice: tools lack {self.function or 'a function to call'}")
        return offered


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat prepared for the engine and the parser of its output."""

    prompt: str
    params: SamplingParams
    task: Generate
    syntax: ChatSyntax


class ChatFormat:
    """A model's chat format: its template, and the families of its tool calls and reasoning. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tools: str | None = None, thinking: str | None = None) -> None:
        """`tools` and `thinking` override the families derived from the template; `none` disables a feature."""
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template or ""
        self._asked_tools = tools
        self._thinking = thinking or detect_thinking(self._template)
        self._grammar = CallGrammar(tokenizer)

    def prepare(
        self, messages: Sequence[Message], options: ChatOptions, params: SamplingParams
    ) -> PreparedChat:
        """Render a chat, and return its prompt with the constraints and the parser of its output.

        Raises:
            InvalidRequest, UnsupportedFeature: the model or its template does not support the request.
        """
        functions = options.offered
        tools = self._tool_syntax() if functions else None
        tags = self._tags
        self._check(options, params)
        structure, trigger = self._structure(functions, options, params, tools)
        is_limited = structure is not None or params.thinking_token_budget is not None
        prompt = self._render(messages, options, tools)
        if tags is not None and params.label_probs is not None:
            prompt += tags.answer  # a label is generated first
            tags = None if tags.answer else tags
        elif tags is not None and tags.after and is_limited:
            prompt += tags.opening
        is_open = tags is not None and tags.is_open_after(prompt)
        is_shut = tags is not None and not is_open and prompt.rstrip().endswith(tags.closing)
        syntax = ChatSyntax(
            None if is_shut else self._thinking if tags else None,
            is_open,
            tools,
            self._values(functions, tools),
        )
        thinking = None
        if tags is not None and not is_shut and is_limited:
            header = tags.after + (tags.answer if structure is params.structured_outputs else "")
            closing = tags.closing + ("" if structure is None or trigger else header)
            thinking = Thinking(
                tags.opening,
                closing,
                is_open,
                opening_ids=tuple(self._encode(tags.opening)),
                closing_ids=tuple(self._encode(closing)),
                budget=params.thinking_token_budget,
                decided_by=tags.closing if closing != tags.closing else "",
            )
        outline = None
        if thinking is not None or trigger:
            allows_more = options.is_parallel is not False and options.function is None
            is_single = tools is not None and _syntax(tools).form.is_single
            outline = Outline(thinking, trigger, is_repeated=allows_more and not is_single)
        marks = [tags.opening, tags.closing] if tags else []
        marks += [*_syntax(tools).opens, _syntax(tools).form.trigger] if tools else []
        if any(self._is_hidden(mark) for mark in marks):
            params = replace(params, skip_special_tokens=False)
        if structure is not None:
            params = replace(params, structured_outputs=structure)
        if tags is not None and (stops := self._stops(tags)):
            params = replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stops))))
        return PreparedChat(prompt, params, Generate(outline), syntax)

    @property
    def parses_every_chat(self) -> bool:
        """True if an output must always be parsed: it has headers, which no job requests."""
        return self._tags is not None and bool(self._tags.after)

    @property
    def _tags(self) -> ThinkingTags | None:
        return None if self._thinking in (None, "none") else THINKING[self._thinking]

    def _stops(self, tags: ThinkingTags) -> list[int]:
        """Return the ids of the special tokens that end an output; empty for a vocabulary without them."""
        found = map(self._encode, tags.stops)
        return [ids[0] for ids in found if len(ids) == 1]

    @cached_property
    def _tools(self) -> str | None:
        """The family of the tool calls; None if it is not supported."""
        detected = self._asked_tools or detect_tools(self._template)
        if self._asked_tools or detected in (None, HARMONY) or "tools" not in self._template:
            return detected
        written = self._written_call()
        if written is None:
            return detected
        return next(
            (
                name
                for name in dict.fromkeys((detected, *TOOLS))
                if name is not None
                and name != HARMONY
                and writes_call(TOOLS[name], written, _TRIAL_NAME, _TRIAL_KEY)
            ),
            None,
        )

    def _written_call(self) -> str | None:
        """Return the template's format of a call in the history; None if it does not write calls."""
        function = {"name": _TRIAL_NAME, "arguments": {_TRIAL_KEY: "value"}}
        call = {"id": "trial0000", "type": "function", "function": function}
        tool = {
            "type": "function",
            "function": {"name": "other", "description": "", "parameters": _NO_PARAMETERS},
        }
        user, turn = {"role": "user", "content": "x"}, {"role": "assistant", "content": ""}
        try:
            plain, called = (
                self._tokenizer.render_chat([user, last], [tool], {})
                for last in (turn | {"content": "~"}, turn | {"tool_calls": [call]})
            )
        except InvalidRequest:
            return None
        written = called[len(commonprefix([plain, called])) :]  # noqa: RUF071  # of texts
        return written if _TRIAL_NAME in written else None

    def _tool_syntax(self) -> str:
        if self._tools is not None and self._tools != "none":
            return self._tools
        known = ", ".join((*TOOLS, *PLUGINS.names))
        family = unsupported_family(self._template) or "this model"
        raise UnsupportedFeature(
            f"tools: the calls of {family} are not supported; start the worker with tool_call_parser set to one of "
            f"{known}"
        )

    def _check(self, options: ChatOptions, params: SamplingParams) -> None:
        has_thinking = self._thinking not in (None, "none")
        if params.thinking_token_budget is not None and not has_thinking:
            raise UnsupportedFeature(
                "thinking_token_budget: the model's template shows no thinking; use max_tokens, or start the worker "
                f"with reasoning_parser set to one of {', '.join(THINKING)}"
            )
        if options.template_kwargs.get(CONTINUE) and self._tags is not None and self._tags.after:
            raise UnsupportedFeature(
                f"{CONTINUE}: an answer of this model has headers, and can't be continued"
            )
        words = ("reasoning_effort", *_SWITCHES)
        efforts = self._tags.efforts if self._tags else ()
        if options.reasoning_effort is not None and efforts and options.reasoning_effort not in efforts:
            raise UnsupportedFeature(
                f"reasoning_effort: the model knows {', '.join(efforts)}, not {options.reasoning_effort}"
            )
        never_thinks = not has_thinking and detect_thinking(self._template) is None
        is_met = options.reasoning_effort is None or (options.reasoning_effort == "none" and never_thinks)
        if not is_met and not any(word in self._template for word in words):
            raise UnsupportedFeature(
                "reasoning_effort: the model's chat template has no such variable; use thinking_token_budget, or a "
                "model whose template has one"
            )

    def _render(self, messages: Sequence[Message], options: ChatOptions, tools: str | None) -> str:
        variables: dict[str, Any] = {}
        if options.reasoning_effort is not None:
            is_on = options.reasoning_effort != "none"
            variables = {"reasoning_effort": options.reasoning_effort} | dict.fromkeys(_SWITCHES, is_on)
        variables |= options.template_kwargs
        names = {function.name for function in options.offered}
        shown = [
            {**tool, "function": normalized(tool["function"])}
            for tool in options.tools
            if tool["function"]["name"] in names
        ]
        turns = [_turn(number, message, tools) for number, message in enumerate(messages)]
        if tools == "kimi_k2":
            number_calls(turns)
        if self._thinking == HARMONY:
            turns = harmony_turns(turns)
        if "tools" not in self._template:
            turns, shown = [_as_text(turn) for turn in _explained(turns, shown)], []
        return self._tokenizer.render_chat(turns, shown, variables)

    def _structure(
        self, functions: list[Function], options: ChatOptions, params: SamplingParams, tools: str | None
    ) -> tuple[StructuredOutputs | None, str]:
        """Return the output's constraint, and the text after which it applies, if not from the start."""
        asked = params.structured_outputs
        if tools is None:
            return asked, ""
        syntax, form = _syntax(tools), _syntax(tools).form
        is_forced = options.choice == "required" or asked is not None or options.is_parallel is False
        if syntax.quote and (is_forced or any(function.is_strict for function in functions)):
            raise UnsupportedFeature(
                f"tools: calls in the syntax {tools} can't be forced or constrained; use tool_choice auto without "
                "strict, parallel_tool_calls and structured_outputs"
            )
        allows_one = options.is_parallel is False or options.function is not None
        try:
            if options.choice == "required":
                # A weak model makes as many calls as are allowed, but clients expect one.
                is_single = form.is_single or allows_one or options.is_parallel is None
                return self._grammar.forced(functions, syntax, is_single=is_single), ""
            if asked is not None:
                if asked.json is None:
                    raise UnsupportedFeature(
                        "structured_outputs with tools: only json is supported, or tool_choice none"
                    )
                return self._grammar.either(
                    functions, syntax, asked.json, is_single=form.is_single or allows_one
                ), ""
            if any(function.is_strict for function in functions) or options.is_parallel is False:
                return self._grammar.triggered(functions, syntax), form.trigger
        except InvalidParameter as error:
            raise InvalidRequest.with_code(error.code, f"tools: {error}") from None
        return None, ""

    def _values(
        self, functions: list[Function], tools: str | None
    ) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the parameters with non-text values, if the syntax does not mark them. Raises InvalidRequest."""
        if tools is None or _syntax(tools).elements is None:
            return ()
        found = []
        for function in functions:
            properties = function.schema.get("properties", {}).items()
            keys = tuple(key for key, value in properties if not is_text_schema(value, function.schema))
            if keys:
                found.append((function.name, keys))
        if sum(len(name) + sum(map(len, keys)) for name, keys in found) > _MAX_NAMES:
            raise InvalidRequest(f"tools: the names of parameters have more than {_MAX_NAMES} characters")
        return tuple(found)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _is_hidden(self, mark: str) -> bool:
        """Return True if a mark consists of special tokens, which texts omit."""
        return mark not in self._tokenizer.decode(self._encode(mark))


def _syntax(name: str) -> ToolSyntax:
    found = find_tools(name)
    assert found is not None, name
    return found


def _turn(number: int, message: Message, tools: str | None) -> dict[str, Any]:
    """Return a message in the form for templates: arguments as objects, contents as texts. Raises InvalidRequest.

    Args:
        number: its index among the messages.
    """
    turn = {name: value for name, value in message.items() if value is not None} | {
        "content": message.get("content") or ""
    }
    if "reasoning" in turn:
        turn["reasoning_content"] = turn["reasoning"]
    if "tool_call_id" in turn:
        turn["tool_call_id"] = _short_id(turn["tool_call_id"], tools)
    if "tool_calls" in turn:
        turn["tool_calls"] = [
            {
                "id": _short_id(call["id"], tools),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _object(
                        call["function"].get("arguments"),
                        f"messages.{number}.tool_calls.{position}.function.arguments",
                    ),
                },
            }
            for position, call in enumerate(turn["tool_calls"])
        ]
    return turn


def _short_id(name: str, tools: str | None) -> str:
    """Return a call's id; Mistral's templates only accept nine letters and digits."""
    is_mistral = tools is not None and tools.startswith("mistral")
    return "".join(filter(str.isalnum, name))[-9:].rjust(9, "0") if is_mistral else name


def _object(arguments: Any, place: str) -> Any:
    """Return a call's arguments. Raises InvalidRequest if they are not an object, as in a truncated call."""
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{place}: is not JSON; if max_tokens ended that call, leave it out of the history"
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place}: is not a JSON object")
    return value


def _explained(turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Explain the tools in the system message, for a template that does not."""
    if not tools:
        return turns
    explanation = _EXPLANATION.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{explanation}"}, *turns[1:]]
    return [{"role": "system", "content": explanation}, *turns]


def _as_text(turn: dict[str, Any]) -> dict[str, Any]:
    """Write calls and their results as texts, for a template that supports neither."""
    if turn["role"] == "tool":
        return {"role": "user", "content": f"The function returned: {turn['content']}"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    return {name: turn[name] for name in ("role", "name") if name in turn} | {
        "content": "\n".join(filter(None, [turn["content"], *calls])) if calls else turn["content"],
    }
