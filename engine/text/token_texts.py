"""The texts of single tokens, for log-probabilities."""

from __future__ import annotations

import json
import re
from functools import cached_property

from pagemill.engine.text.byte_level import byte_characters
from pagemill.engine.text.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts of token ids. Thread-safe: two threads may compute the same one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer all texts are empty."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Return the token's text; for part of a character, its bytes in OpenAI's notation, `bytes:\\xe4\\xbd`."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        raw = self._bytes(token_id, piece)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes(self, token_id: int, piece: str) -> bytes:
        if token_id in self._added:
            return piece.encode()
        if self._is_byte_level and self._bytes_of.keys() >= set(piece):
            return bytes(self._bytes_of[character] for character in piece)
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    @cached_property
    def _description(self) -> dict[str, object]:
        assert self._tokenizer is not None
        described: dict[str, object] = json.loads(self._tokenizer.to_json() or "{}")
        return {name: described.get(name) for name in ("added_tokens", "decoder")}

    @cached_property
    def _added(self) -> frozenset[int]:
        added = self._description["added_tokens"]
        return frozenset(token["id"] for token in added) if isinstance(added, list) else frozenset()

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(self._description["decoder"])

    @cached_property
    def _bytes_of(self) -> dict[str, int]:
        return {character: byte for byte, character in enumerate(byte_characters())}
