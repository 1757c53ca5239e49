"""Incremental detokenisation: token ids arrive a few at a time, text leaves when it is final."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.engine.text.tokenizer import Tokenizer

# Prompt tokens kept as left context: enough for a merged character and for a leading space.
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One sample's text.

    A token's text may depend on its neighbours, so a window of tokens is decoded; the new text is its text
    minus that of the window's already final part. A trailing replacement character means that a character's
    bytes are still incomplete: nothing is final until the rest arrives, or `flush` is called.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._num_final = len(self._window)
        self._final_text = self._decode(self._window)

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make final; may be empty. Their grouping does not matter."""
        return "".join(map(self._append_one, token_ids))

    def _append_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._final_text) or text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return the remaining text, including incomplete characters."""
        text = self._decode(self._window)
        return self._advance(text) if len(text) > len(self._final_text) else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._final_text) :]
        # The previously new tokens become the context of the next ones.
        self._window = self._window[self._num_final :]
        self._num_final = len(self._window)
        self._final_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Watches a sample's text for stop strings and holds back text that may become one."""

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
        """Return the length of the longest suffix of the held text that begins some stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stop) - 1)
        for length in range(longest, 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
