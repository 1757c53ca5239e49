"""Texts of single tokens: their bytes, one after the other, are the text's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.token_texts import TokenTexts
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from pagemill.producer.openai.formats import token_bytes
from pagemill.producer.wire.schema.outputs import TokenLogprob


class SentencePieces:
    """A tokenizer as Llama 2 has it: spaces as `▁`, bytes for what is not in the vocabulary."""

    def __init__(self) -> None:
        pieces = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "\u2581",
            "a",
            "b",
            "\u2581a",
        ]
        vocabulary: Any = {piece: number for number, piece in enumerate(pieces)}
        self.backend = Backend(
            models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        self.backend.add_special_tokens(["<s>", "</s>"])
        self.backend.normalizer = normalizers.Replace(" ", "\u2581")
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text).ids)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def to_json(self) -> str:
        return self.backend.to_str()


@pytest.fixture(scope="module", params=["bytes", "smollm2", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    match request.param:
        case "bytes":
            return ByteTokenizer()
        case "smollm2":
            return HuggingFaceTokenizer(packaged_model_directory())
    return SentencePieces()


def bytes_of(texts: TokenTexts, token_ids: list[int]) -> bytes:
    return b"".join(token_bytes(TokenLogprob(token_id=i, logprob=None, text=texts(i))) for i in token_ids)


@pytest.mark.ci
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_tokens_are_the_texts_bytes(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    # A vocabulary may lack bytes: what it takes in is what it gives out.
    taken = tokenizer.decode(token_ids, skip_special_tokens=False)
    if "\ufffd" not in taken:
        assert bytes_of(TokenTexts(tokenizer), token_ids) == taken.encode()


def test_part_of_a_character_is_spelled_as_its_bytes(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    found = [texts(token) for token in tokenizer.encode("a\U0001f9ff", add_special_tokens=False)]
    assert found[0] == "a"
    assert "".join(found[1:]).replace("bytes:", "") == r"\xf0\x9f\xa7\xbf"


def test_special_tokens_are_what_they_are_called() -> None:
    assert TokenTexts(SentencePieces())(2) == "</s>"  # type: ignore[arg-type]
    assert TokenTexts(ByteTokenizer())(256) == "<end>"
    smollm2 = HuggingFaceTokenizer(packaged_model_directory())
    assert smollm2.eos_token_id is not None
    assert TokenTexts(smollm2)(smollm2.eos_token_id) == "<|im_end|>"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert TokenTexts(None)(5) == ""
