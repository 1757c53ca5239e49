"""The echo model's inputs, with a word in place of each image, to test clients without a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from pagemill.engine.text.input_processor import InputProcessor
from pagemill.engine.text.tokenizer import Message

IMAGE: Final = "[image]"


class EchoInputs(InputProcessor):
    def __reduce__(self) -> Any:
        """Omit cached state of requests."""
        make, arguments = super().__reduce__()
        return partial(EchoInputs, **make.keywords), arguments

    def read_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with only text."""
        return [{**message, "content": _as_text(message.get("content"))} for message in messages]


def _as_text(content: Any) -> Any:
    return "".join(part.get("text", IMAGE) for part in content) if isinstance(content, list) else content
