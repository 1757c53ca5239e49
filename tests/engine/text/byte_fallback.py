"""Tokenizers that write characters outside their vocabulary as byte tokens, as Llama 2's, Mistral's and Gemma's do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"
FIRST_BYTE = 3
"""The id of the token of byte 0."""
KINDS = ("llama", "mistral", "gemma")


class ByteFallback:
    """A tokenizer whose vocabulary has a few ASCII letters, and every byte."""

    eos_token_id: int | None = 2
    chat_template: str | None = None

    def __init__(self, kind: str) -> None:
        words = ["a", "b", "yes", ":", "S", "y", "e", "s", "ye", SPACE, f"{SPACE}a", f"{SPACE}yes", "é"]
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        merges = [("y", "e"), ("ye", "s"), (SPACE, "a"), (SPACE, "yes")]
        vocabulary: Any = {piece: number for number, piece in enumerate(pieces)}
        self.backend = Backend(
            models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        self.backend.add_special_tokens(["<unk>", "<s>", "</s>"])
        strip = []
        if kind == "mistral":
            self.backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        elif kind == "llama":
            self.backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
            )
        else:
            self.backend.normalizer = normalizers.Replace(" ", SPACE)
        if kind != "gemma":
            strip = [decoders.Strip(" ", 1, 0)]
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        self.vocab_size = len(pieces)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def render_chat(self, messages: Sequence[Any], tools: Sequence[Any], variables: Any) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        return self.backend.to_str()


@lru_cache
def byte_fallback(kind: str) -> ByteFallback:
    return ByteFallback(kind)


def byte_tokens(data: bytes) -> list[int]:
    """Return the tokens of single bytes."""
    return [FIRST_BYTE + byte for byte in data]
