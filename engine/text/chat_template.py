"""The chat template of a model: the configured one, or the one next to its tokenizer.

A template is a program of the model's publisher. It runs in Jinja's sandbox, in a process with limits on CPU time and
memory. It can only read the messages.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pagemill.engine.errors import ConfigError, InvalidRequest, ModelLoadError, UnsupportedFeature
from pagemill.engine.limited_process import Refused
from pagemill.engine.text.text_child import environment
from pagemill.engine.text.text_process import TextProcess

_MAX_BYTES = 2**20
_MAX_REASON = 300
_RESERVED = {"chat_template", "conversation", "messages", "tokenize", "tools"}
CONTINUE = "continue_final_message"
"""The variable that leaves the last turn open, as in transformers' apply_chat_template."""
_END = "pagemill7end"
_SAMPLE = "pagemill7sample"
_SAMPLE_TURNS: dict[str, tuple[str, ...]] = {
    "user": ("user",), "system": ("system", "user"), "assistant": ("user", "assistant", "user"),
    "tool": ("user", "assistant", "tool"),
}  # fmt: skip
"""For each role, the roles of a conversation in which its text should be shown. `user` is the first."""
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
"""transformers' name of a model's template for conversations with tools."""


class ChatTemplate:
    """Renders conversations in the format on which the model was trained."""

    def __init__(self, tokenizer: Any, directory: Path, asked: str | None) -> None:
        """Choose the template.

        Args:
            tokenizer: transformers' tokenizer.
            asked: a file, or the name of one of the model's templates; None: the model's default.

        Raises:
            ConfigError: the template does not exist, or cannot be parsed.
        """
        self._special_tokens = {name: _plain(token) for name, token in tokenizer.special_tokens_map.items()}
        self._process = TextProcess()
        self._parts_by_template: dict[str, frozenset[str] | None] = {}
        own = tokenizer.chat_template or _beside(directory)
        self._named: dict[str, str] = own if isinstance(own, dict) else {_DEFAULT: own} if own else {}
        self.text = self._named.get(_DEFAULT) if asked is None else self._asked_for(asked)
        if self.text is not None:
            self._check_syntax(self.text, asked, directory)

        self._with_tools = self._named.get(_WITH_TOOLS, self.text) if asked is None else self.text
        texts = [text for text in (self.text, self._with_tools) if text is not None]
        self.source: str | None = "\n".join(dict.fromkeys(texts)) if texts else None
        """All templates for conversations: some models have a separate one for tools."""

    def render(self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any]) -> str:
        """Return the conversation as text, with the assistant's turn opened.

        Args:
            tools: functions that the model may call, in OpenAI's form.
            variables: further names that the template can read. With `CONTINUE`, the text ends with the last message,
                which the assistant continues.

        Raises:
            UnsupportedFeature: there is no template.
            InvalidRequest: the template rejects these messages, or needs too much time or memory for them.
        """
        template = self._with_tools if tools else self.text
        if template is None:
            raise UnsupportedFeature(self._no_template_message())
        if not messages:
            raise InvalidRequest("a chat needs a message")
        if taken := sorted(_RESERVED & variables.keys()):
            raise InvalidRequest(f"chat_template_kwargs: {', '.join(taken)} can't be set")
        values = self._special_tokens | {"add_generation_prompt": True} | dict(variables)
        values |= {"tools": tools or None, "documents": variables.get("documents")}
        parts = self._roles_in_parts(template, values)
        if parts is None and any(message.get("role") == "user" for message in messages):
            raise InvalidRequest("the chat template leaves out the text of user messages; use another")
        is_continued = bool(values.pop(CONTINUE, False))
        last = messages[-1]
        if is_continued:
            values["add_generation_prompt"] = False
            check_continued(last)
            messages = [*messages[:-1], {**last, "content": f"{last['content']}{_END} "}]
        values["messages"] = [_known_fields(message, parts or ()) for message in messages]
        try:
            text = self._process.render(template, values)
            return _before_end(text, last) if is_continued else text
        except Refused as error:
            # The template's message (raise_exception) is the reason that its user needs.
            raise InvalidRequest(
                f"the chat template rejects these messages: {str(error)[:_MAX_REASON]}"
            ) from None

    def _roles_in_parts(self, template: str, values: Mapping[str, Any]) -> frozenset[str] | None:
        """Return the roles whose contents the template renders only as lists of parts, not as text.

        None: it does not render a user's text in either form. Raises InvalidRequest if it exceeds a limit.
        """
        if template in self._parts_by_template:
            return self._parts_by_template[template]
        parts: frozenset[str] = frozenset()
        is_certain = True
        for role, turns in _SAMPLE_TURNS.items():
            # The other forms are tried only where the text is missing.
            for candidate in (parts, parts ^ {role}):
                is_shown = self._shows(template, values, role, turns, candidate)
                if is_shown:
                    parts = candidate
                    break
                if is_shown is None and role == "user":
                    is_certain = False
            else:
                if role != "user":
                    parts = parts | {role} if "user" in parts else parts - {role}
                elif is_certain:
                    self._parts_by_template[template] = None
                    return None
        if is_certain:
            self._parts_by_template[template] = parts
        return parts

    def _shows(
        self,
        template: str,
        values: Mapping[str, Any],
        role: str,
        turns: tuple[str, ...],
        parts: frozenset[str],
    ) -> bool | None:
        """Return whether a sample's text is in the prompt; None if the template rejects the sample."""
        sample = [{"role": one, "content": _SAMPLE if one == role else "x"} for one in turns]
        try:
            text = self._process.render(
                template, {**values, "messages": [_known_fields(message, parts) for message in sample]}
            )
        except Refused:
            return None
        return _SAMPLE in text.lower()

    def _no_template_message(self) -> str:
        what = "send a prompt instead of messages, or start the worker with --chat-template"
        if self._named:
            names = ", ".join(sorted(self._named))
            return f"this model has several chat templates ({names}) and no default: {what} NAME"
        return f"this model has no chat template: {what} FILE"

    def _asked_for(self, asked: str) -> str:
        file = Path(asked).expanduser()
        if not file.is_file():
            if asked in self._named:
                return self._named[asked]
            names = f"; the model's own are {', '.join(sorted(self._named))}" if self._named else ""
            raise ConfigError(f"chat_template: file {asked!r} does not exist{names}", setting="chat_template")
        try:
            with file.open("rb") as opened:
                content = opened.read(_MAX_BYTES + 1)
            text = content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template: can't read {file}: {error}", setting="chat_template"
            ) from error
        if len(content) > _MAX_BYTES or not text.strip():
            raise ConfigError(
                f"chat_template: {file} should have 1 to {_MAX_BYTES} bytes",
                setting="chat_template",
            )
        return text

    def _check_syntax(self, text: str, asked: str | None, directory: Path) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            environment().parse(text)  # compiling computes constants, which may take unbounded time
        except (TemplateSyntaxError, RecursionError) as error:
            message = f"line {getattr(error, 'lineno', 1)}: {error}"
            if asked is not None:
                raise ConfigError(f"chat_template: {asked}: {message}", setting="chat_template") from error
            raise ModelLoadError(
                f"can't read the chat template in {directory}: {message}; give one with chat_template"
            ) from error


def _known_fields(message: Mapping[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Return a message without empty fields, with its reasoning under all names that templates read.

    Args:
        parts: the roles whose contents the template reads as lists of parts.
    """
    known = {name: value for name, value in message.items() if value is not None}
    if message.get("role") in parts and isinstance(known.get("content"), str):
        known["content"] = [{"type": "text", "text": known["content"]}]
    names = ("reasoning_content", "thinking", "reasoning")
    if (reasoning := next((known[name] for name in names if name in known), None)) is not None:
        known = {"thinking": reasoning} | known | {"reasoning_content": reasoning}
    return known


def check_continued(message: Mapping[str, Any]) -> None:
    """Check that there is something to continue in a last message. Raises InvalidRequest."""
    content = message.get("content")
    if (
        message.get("role") != "assistant"
        or message.get("tool_calls")
        or not isinstance(content, str)
        or not content
    ):
        raise InvalidRequest(
            f"{CONTINUE}: the last message should be the assistant's, with a text to continue"
        )


def _before_end(text: str, message: Mapping[str, Any]) -> str:
    """Return a conversation up to the end of its last message. Raises InvalidRequest if that is incomplete."""
    before, end, after = text.rpartition(_END)
    if not end or message["content"].strip() not in before:
        raise InvalidRequest(f"{CONTINUE}: the chat template leaves out the text of the last message")
    # A template that trims contents would have trimmed the end of this one too.
    return before if after.startswith(" ") else before.rstrip()


def _plain(token: Any) -> Any:
    return [str(one) for one in token] if isinstance(token, list | tuple) else str(token)


def _beside(directory: Path) -> str | dict[str, str] | None:
    """Return the content of `chat_template.json`, which transformers only reads for processors."""
    file = directory / "chat_template.json"
    if not file.is_file():
        return None
    try:
        own = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"can't read {file}: {error}; give a template with chat_template") from error
    if isinstance(own, list):
        own = {entry["name"]: entry["template"] for entry in own}
    return own if isinstance(own, str | dict) else None
