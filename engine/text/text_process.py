"""A process with limits for the code of a model's publisher: its chat template, and a tokenizer of unknown cost.

A template can loop for hours or exhaust memory, and so can a tokenizer's patterns.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.engine.child_messages import pack
from pagemill.engine.errors import InvalidRequest, ModelLoadError
from pagemill.engine.limited_process import Exceeded, LimitedProcess, Refused
from pagemill.engine.text.text_child import CALL_S, LOAD_S, MEMORY_MIB

Text = str | tuple[str, str]
"""A text, or a pair."""


class TextProcess(LimitedProcess):
    """Renders and encodes in a separate process. Thread-safe."""

    def __init__(
        self, tokenizer_json: str | None = None, *, call_s: float = CALL_S, memory_mib: int = MEMORY_MIB
    ) -> None:
        """Create it without a process.

        Args:
            tokenizer_json: the content of a tokenizer.json, for `encode`.
            call_s: CPU time for a call, in seconds, in addition to that for the length of its texts.
            memory_mib: memory in addition to that of the started process.
        """
        super().__init__(
            "pagemill.engine.text.text_child",
            (call_s, memory_mib),
            f"takes more than {call_s:g} s of CPU time or {memory_mib} MiB",
        )
        self._tokenizer_json, self._memory_mib = tokenizer_json, memory_mib

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Return a rendered template.

        Raises:
            Refused: the template raised an error.
            InvalidRequest: the values are not valid JSON, or rendering exceeded a limit.
        """
        try:
            packed = marshal.dumps(dict(values))
        except ValueError:
            raise InvalidRequest("messages and chat_template_kwargs must consist of JSON values") from None
        try:
            text: str = self._call("render", template, packed)
        except Exceeded as error:
            raise InvalidRequest(f"the chat template {error} for these messages") from None
        return text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises the same as `encode_all`."""
        ((ids, _, _),) = self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    def encode_all(
        self, texts: Sequence[Text], *, add_special_tokens: bool = True, shorten_to: int | None = None
    ) -> list[tuple[list[int], list[int], list[int]]]:
        """Return the token ids of texts or pairs of texts, the tokens' types, and 1 for each special token.

        Args:
            shorten_to: maximum number of tokens of a text; the end of a longer one is cut.

        Raises:
            InvalidRequest: the tokenizer raised an error, or exceeded a limit.
        """
        try:
            encoded: list[tuple[list[int], list[int], list[int]]] = self._call(
                "encode", list(texts), add_special_tokens, shorten_to
            )
        except Refused as error:
            raise InvalidRequest(f"the tokenizer rejects the text: {error}") from None
        except Exceeded as error:
            raise InvalidRequest(f"the tokenizer {error} for this text") from None
        return encoded

    def try_loading(self) -> None:
        """Load the tokenizer and encode a sample. Raises ModelLoadError."""
        try:
            with self._lock:
                self._start(is_trial=True)
        except (Refused, Exceeded) as error:
            raise ModelLoadError(
                f"can't load tokenizer.json: it {error}; it may be damaged or hostile"
            ) from None

    def _start(self, *, is_trial: bool = False) -> None:
        super()._start()
        if self._tokenizer_json is not None:
            limits = f"takes more than {LOAD_S:g} s of CPU time or {self._memory_mib} MiB"
            self._answer(pack("load", self._tokenizer_json, is_trial), limits)


def is_panic(error: BaseException) -> bool:
    """Return whether the error is a panic of Rust code, which is not an Exception."""
    return type(error).__name__ == "PanicException"
