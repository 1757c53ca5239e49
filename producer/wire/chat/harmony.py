"""Parser of harmony, the format of gpt-oss: messages with a channel and sometimes a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. The
analysis is the reasoning; a message with a recipient (`to=functions.NAME`, before or after the channel) is a
tool call; any other is content. The format's guide is in github.com/openai/harmony.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from pagemill.common.chat.markers import held_back
from pagemill.producer.wire.chat.pieces import Piece, is_function_name

_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_STARTS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "to=")
"""Possible starts of a header. The prompt may contain its `<|start|>assistant` already."""
_HEADER_LIMIT: Final = 512
"""Maximum characters of a header; a longer one is content."""
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"(?:^|\s)to=([^\s<]{1,128})(?=[\s<]|$)")
_CHANNELS: Final = "|".join(
    name[:length] for name in ("analysis", "commentary", "final") for length in range(len(name), -1, -1)
)
_CUT_HEADER: Final = re.compile(
    rf"(?:<\|start\|>(?:assistant)?)?(?:\s*to=functions\.[^\s<]*)?"
    rf"(?:<\|channel\|>(?:{_CHANNELS})(?:\s+to=[^\s<]*)?(?:\s*<\|constrain\|>\w*|\s+\w*)?)?"
)
"""A header up to where `max_tokens` cut it off."""
_NO_TOOLS: Final = frozenset({"assistant", "user", "all"})
_NAMESPACE: Final = "functions."

_Kind = Literal["reasoning", "content", "call"]


class HarmonyParser:
    """Splits one sample's text into reasoning, content and calls. Never raises: malformed text is content.

    The output does not depend on how the text was split into chunks.
    """

    def __init__(self, *, is_open: bool, has_tools: bool) -> None:
        """Start with a header, or within the reasoning.

        Args:
            is_open: the prompt ends with the header of a message in the analysis channel.
            has_tools: messages to a recipient are calls; otherwise their channel decides.
        """
        self._has_tools = has_tools
        self._buffer = ""
        self._kind: _Kind | None = "reasoning" if is_open else None
        """The kind of the current message; None: its header has not ended."""
        self._num_calls = 0
        self._written: set[_Kind] = set()
        """Kinds with text in an earlier message: a line break separates it from the next one's."""
        self._is_first = True
        """The current message has no output yet."""

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the text adds."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._header(pieces) if self._kind is None else self._body(pieces, self._kind):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return the text that was held back until the end. An incomplete header is dropped."""
        pieces: list[Piece] = []
        if self._kind is None:
            begun = self._buffer.lstrip()
            self._begin("content")
            self._write(pieces, "content", "" if _CUT_HEADER.fullmatch(begun) else self._buffer)
        else:
            self._write(pieces, self._kind, self._buffer)
        self._buffer = ""
        return pieces

    # A state consumes what it can from the buffer, and returns True if another step may follow.

    def _header(self, pieces: list[Piece]) -> bool:
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if not begun.startswith(_STARTS):
            if any(mark.startswith(begun) for mark in _STARTS):
                return False
            self._begin("content")
            return True
        places = [
            (at, mark)
            for mark in (_MESSAGE, *_ENDS)
            if (at := self._buffer.find(mark, 0, _HEADER_LIMIT + len(mark))) >= 0
        ]
        if not places:
            if len(self._buffer) < _HEADER_LIMIT + max(map(len, (_MESSAGE, *_ENDS))):
                return False
            self._begin("content")
            return True
        at, mark = min(places)
        header, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        if mark == _MESSAGE:
            self._open(pieces, header)
        else:  # a message without a body
            self._begin("content")
            self._write(pieces, "content", header)
            self._kind = None
        return True

    def _open(self, pieces: list[Piece], header: str) -> None:
        """Start the message that a header announces."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None or recipient[1] in _NO_TOOLS else recipient[1].removeprefix(_NAMESPACE)
        if self._has_tools and is_function_name(name):
            self._begin("call")
            pieces.append(Piece("call", "", self._num_calls, name))
            self._num_calls += 1
        else:
            self._begin("reasoning" if channel is not None and channel[1] == "analysis" else "content")

    def _begin(self, kind: _Kind) -> None:
        self._kind, self._is_first = kind, True

    def _body(self, pieces: list[Piece], kind: _Kind) -> bool:
        places = [(at, mark) for mark in _ENDS if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._write(pieces, kind, self._buffer[:at])
            self._buffer, self._kind = self._buffer[at + len(mark) :], None
            return True
        ready = len(self._buffer) - max(held_back(self._buffer, mark) for mark in _ENDS)
        self._write(pieces, kind, self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _write(self, pieces: list[Piece], kind: _Kind, text: str) -> None:
        if not text:
            return
        if kind == "call":
            pieces.append(Piece(kind, text, self._num_calls - 1))
            return
        if self._is_first and kind in self._written:
            text = f"\n{text}"
        self._is_first = False
        self._written.add(kind)
        pieces.append(Piece(kind, text))
