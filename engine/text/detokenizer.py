"""Incremental detokenization: accepts a few token ids at a time, and releases text once it is final."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from pagemill.engine.text.tokenizer import Tokenizer

# Prompt tokens used as left context: enough for a merged character and for a leading space.
_CONTEXT_TOKENS = 6
# Maximum number of unreleased tokens in a window before its older ones are dropped. Bounds the cost per token.
_MAX_WINDOW = 24
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


# A decoder with byte fallback writes a replacement character for each invalid byte.
_EACH_BYTE = "pagemill.replace_each"
codecs.register_error(_EACH_BYTE, _replace_each)


class Detokenizer:
    """One sample's text.

    A token's text may depend on its neighbors, so a window of tokens is decoded; the new text is its text
    minus that of the window's already final part. A trailing replacement character may be an incomplete
    character: it is not final until another follows, or `flush` is called.

    Decoders with byte fallback replace all bytes of a run if one of them is invalid, so a window cannot be cut within
    a run. Tokens that represent single bytes are decoded here, which preserves and releases valid characters of a run.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._text = ""
        self._num_final = 0
        """Number of final characters of the window's text."""
        self._final_ends_open = False
        self._set_context(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._bytes = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        self._num_prompt_bytes = 0
        """Bytes of an incomplete character at the end of the prompt."""
        self._read_prompt_bytes(prompt_token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make final; may be empty. Their grouping does not matter."""
        return "".join(map(self._append_one, token_ids))

    def _append_one(self, token_id: int) -> str:
        byte = self._byte_of(token_id)
        if byte is not None:
            return self._append_byte(token_id, byte)
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text and self._is_empty(token_id):
            self._window.pop()  # such as a hidden special token: the characters around it are neighbors
            return ""
        before = self._end_bytes()
        self._text = text
        if self._num_final and self._final_ends_open and text[self._num_final - 1] != _REPLACEMENT:
            self._num_final -= 1  # the output completes the prompt's last character
        end = len(text) - text.endswith(_REPLACEMENT)
        if end <= self._num_final:
            self._shorten()
            return before
        self._final_ends_open = False
        new = text[self._num_final : end]
        if end == len(text):
            self._set_context(self._window[self._num_context :])
        else:
            self._num_final = end
            self._shorten()
        return before + new

    def _append_byte(self, token_id: int, byte: int) -> str:
        before = self._rest()
        text = self._own(self._bytes.decode(bytes([byte])))
        if text == " " and not self._text:
            text = self._decode([*self._window, token_id])  # some decoders strip the first space
        self._set_context([*self._window, token_id][-_CONTEXT_TOKENS:])
        return before + text

    def flush(self) -> str:
        """Return the remaining text, including incomplete characters."""
        return self._end_bytes() + self._rest()

    def _rest(self) -> str:
        new = self._text[self._num_final :]
        self._num_final = max(self._num_final, len(self._text))
        return new

    def _end_bytes(self) -> str:
        return self._own(self._bytes.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """Return a text without the replacement characters of the prompt's bytes."""
        if text and self._num_prompt_bytes:
            invalid = len(text) - len(text.lstrip(_REPLACEMENT))
            text = text[min(invalid, self._num_prompt_bytes) :]
            self._num_prompt_bytes = 0
        return text

    def _read_prompt_bytes(self, token_ids: Sequence[int]) -> None:
        tail: list[int] = []
        for token_id in reversed(token_ids[1 - _MAX_CHARACTER_BYTES :]):
            if (byte := self._byte_of(token_id)) is None:
                break
            tail.insert(0, byte)
        self._bytes.decode(bytes(tail))
        self._num_prompt_bytes = len(self._bytes.getstate()[0])

    def _byte_of(self, token_id: int) -> int | None:
        """Return the byte that a byte-fallback token represents; None for any other token."""
        piece = self._tokenizer.piece(token_id)
        found = None if piece is None else _BYTE_PIECE.fullmatch(piece)
        # An ordinary token may have such a name: its text is its name.
        return None if found is None or self._decode([token_id]) == piece else int(found[1], 16)

    def _is_empty(self, token_id: int) -> bool:
        # Twice, since some decoders strip the first space.
        return not self._decode([token_id, token_id])

    def _set_context(self, token_ids: Sequence[int]) -> None:
        """Start a window with tokens whose text is final."""
        self._window = list(token_ids)
        self._num_context = len(self._window)
        self._text = self._decode(self._window)
        self._num_final = len(self._text)
        self._final_ends_open = self._text.endswith(_REPLACEMENT)

    def _shorten(self) -> None:
        """Drop a long window's older tokens. Only its last character, of up to 3 bytes, can be incomplete."""
        if len(self._window) <= _MAX_WINDOW:
            return
        window = self._window[-_MAX_WINDOW // 2 :]
        text = self._decode(window)
        # The first characters may differ, since the window may start within a character.
        if len(text) >= _MAX_CHARACTER_BYTES and text.endswith(_REPLACEMENT):
            self._num_final += len(text) - len(self._text)
            self._window, self._num_context, self._text = window, 0, text

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Searches a sample's text for stop strings and holds back text that may become one."""

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """Return (text to release, the stop string found or None). Must not be called again after a stop."""
        if not self._stop:
            return text, None
        self._held += text
        found = min(
            ((at, -len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            at, _, stop = found
            released, self._held = self._held[: at + len(stop) if self._include else at], ""
            return released, stop
        keep = self._longest_open_prefix()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released, None

    def flush(self) -> str:
        released, self._held = self._held, ""
        return released

    def _longest_open_prefix(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stop) - 1)
        for length in range(longest, 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
