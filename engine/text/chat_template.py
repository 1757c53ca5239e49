"""The chat template of a model: the one asked for, or the one that lies beside its tokenizer.

A template is a program of the model's publisher. transformers runs it in Jinja's sandbox: it reads the messages, and
reaches nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagemill.engine.errors import ConfigError, InvalidRequest, ModelLoadError, UnsupportedFeature

_MAX_BYTES = 2**20
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
"""What transformers calls the template that models have for conversations with tools."""


class ChatTemplate:
    """Writes conversations as the model was trained to read them."""

    def __init__(self, tokenizer: Any, directory: Path, asked: str | None) -> None:
        """Choose the template.

        Args:
            tokenizer: transformers' own.
            asked: a file, or the name of one of the model's templates; None: the model's default.

        Raises:
            ConfigError: there is no such template, or it can't be parsed.
        """
        self._tokenizer = tokenizer
        own = tokenizer.chat_template or _beside(directory)
        self._named: dict[str, str] = own if isinstance(own, dict) else {_DEFAULT: own} if own else {}
        self.text = self._named.get(_DEFAULT) if asked is None else self._asked_for(asked)
        if self.text is not None:
            self._check_syntax(self.text, asked, directory)

        self._with_tools = self._named.get(_WITH_TOOLS, self.text) if asked is None else self.text
        texts = [text for text in (self.text, self._with_tools) if text is not None]
        self.source: str | None = "\n".join(dict.fromkeys(texts)) if texts else None
        """All that conversations are written by: some models have a template of its own for tools."""

    def render(self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any]) -> str:
        """Return the conversation as text, with the assistant's turn opened.

        Args:
            tools: functions that the model may call, in OpenAI's form.
            variables: further names that the template may read.

        Raises:
            UnsupportedFeature: there is no template.
            InvalidRequest: the template refuses these messages.
        """
        template = self._with_tools if tools else self.text
        if template is None:
            raise UnsupportedFeature(self._why_none())
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except Exception as error:  # the template is foreign code: any error is due to these messages
            raise InvalidRequest(
                f"the chat template refuses these messages: {type(error).__name__}"
            ) from error
        return str(text)

    def _why_none(self) -> str:
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
            raise ConfigError(f"chat_template: there is no file {asked!r}{names}", setting="chat_template")
        try:
            with file.open("rb") as opened:
                content = opened.read(_MAX_BYTES + 1)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template: can't read {file}: {error}", setting="chat_template"
            ) from error
        if len(content) > _MAX_BYTES or not text.strip():
            raise ConfigError(
                f"chat_template: {file} is no template: it should have 1 to {_MAX_BYTES} bytes",
                setting="chat_template",
            )
        return text

    def _check_syntax(self, text: str, asked: str | None, directory: Path) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hi"}], chat_template=text, tokenize=False
            )
        except TemplateSyntaxError as error:
            message = f"line {error.lineno}: {error.message}"
            if asked is not None:
                raise ConfigError(f"chat_template: {asked}: {message}", setting="chat_template") from error
            raise ModelLoadError(
                f"can't read the chat template in {directory}: {message}; give one with chat_template"
            ) from error
        except Exception:  # it may well refuse this conversation
            return


def _beside(directory: Path) -> str | dict[str, str] | None:
    """Return what `chat_template.json` holds, which transformers reads for processors alone."""
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
