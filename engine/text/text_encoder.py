"""Converts batches of complete texts and pairs of texts to token ids. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.text.text_process import Text, TextProcess, is_panic


@dataclass(frozen=True, slots=True)
class EncodedText:
    token_ids: list[int]
    second_start: int
    """Start of a pair's second text; the number of tokens if no token has its type."""


class TextEncoder:
    """A tokenizer with the special tokens that its model was trained with."""

    def __init__(self, tokenizer_json: str, *, gives_types: bool, is_limited: bool = False) -> None:
        """Load the tokenizer.

        Args:
            tokenizer_json: the content of a tokenizer.json without padding and truncation.
            is_limited: encode in a process with limits.
        """
        self._gives_types = gives_types
        self._json = tokenizer_json
        self._process = TextProcess(tokenizer_json) if is_limited else None
        self._tokenizer = _tokenizer(tokenizer_json)
        self._shortening = lru_cache(maxsize=8)(self._shortening_tokenizer)

    def __reduce__(self) -> Any:
        is_limited = self._process is not None
        return partial(TextEncoder, gives_types=self._gives_types, is_limited=is_limited), (self._json,)

    def encode(self, texts: Sequence[Text], *, shorten_to: int | None = None) -> list[EncodedText]:
        """Encode texts, with special tokens; `shorten_to` cuts the end of longer texts, of a pair the longer text's.

        Raises:
            InvalidRequest: a text is not valid Unicode.
        """
        if self._process is not None:
            return [
                _encoded(ids, types, has_types=self._gives_types and isinstance(text, tuple))
                for (ids, types, _), text in zip(
                    self._process.encode_all(texts, shorten_to=shorten_to), texts, strict=True
                )
            ]
        tokenizer = self._tokenizer if shorten_to is None else self._shortening(shorten_to)
        try:
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=True)
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise InvalidRequest("the text is not valid Unicode") from error
        except BaseException as error:  # the special tokens do not leave space for any text
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise InvalidRequest(f"the tokenizer rejects the text: {str(error)[:200]}") from error
        return [
            _encoded(encoding.ids, encoding.type_ids, has_types=self._gives_types and isinstance(text, tuple))
            for encoding, text in zip(encodings, texts, strict=True)
        ]

    def num_leading_tokens(self, prompt: str) -> int:
        """Return the number of tokens before a text in a prompt: all but a special one at its end."""
        if self._process is not None:
            ((_, _, mask),) = self._process.encode_all([prompt])
        else:
            mask = self._tokenizer.encode(prompt, add_special_tokens=True).special_tokens_mask
        return len(mask) - bool(mask and mask[-1])

    def _shortening_tokenizer(self, length: int) -> Any:
        tokenizer = _tokenizer(self._json)
        tokenizer.enable_truncation(length)
        return tokenizer


def _tokenizer(tokenizer_json: str) -> Any:
    from tokenizers import Tokenizer  # an echo worker imports this module without having tokenizers installed

    return Tokenizer.from_str(tokenizer_json)


def _encoded(token_ids: list[int], types: list[int], *, has_types: bool) -> EncodedText:
    start = len(token_ids)
    if has_types and 1 in types:
        start = types.index(1)
    return EncodedText(token_ids, start)
