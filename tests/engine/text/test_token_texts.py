"""Texts of single tokens: their concatenated bytes are those of the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.token_texts import TokenTexts
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from pagemill.producer.openai.formats import token_bytes
from pagemill.producer.wire.schema.outputs import TokenLogprob
from tests.engine.text.byte_fallback import KINDS, byte_fallback


@pytest.fixture(scope="module", params=["bytes", "smollm2", *KINDS])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    match request.param:
        case "bytes":
            return ByteTokenizer()
        case "smollm2":
            return HuggingFaceTokenizer(packaged_model_directory())
    return byte_fallback(request.param)


def bytes_of(texts: TokenTexts, token_ids: list[int]) -> bytes:
    return b"".join(token_bytes(TokenLogprob(token_id=i, logprob=None, text=texts(i))) for i in token_ids)


@pytest.mark.slow
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_tokens_are_the_texts_bytes(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    # A vocabulary may lack bytes: its decoded output equals its encoded input.
    taken = tokenizer.decode(token_ids, skip_special_tokens=False)
    if "\ufffd" not in taken:
        # Some decoders strip the first space, which is part of a token.
        assert bytes_of(TokenTexts(tokenizer), token_ids) in (taken.encode(), b" " + taken.encode())


@pytest.mark.slow
def test_part_of_a_character_is_spelled_as_its_bytes(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    found = [texts(token) for token in tokenizer.encode("a\U0001f9ff", add_special_tokens=False)]
    assert found[0].lstrip(" ") == "a"
    assert "".join(found[1:]).replace("bytes:", "") == r"\xf0\x9f\xa7\xbf"


def test_special_tokens_are_what_they_are_called() -> None:
    assert TokenTexts(byte_fallback("llama"))(2) == "</s>"
    assert TokenTexts(ByteTokenizer())(256) == "<end>"
    smollm2 = HuggingFaceTokenizer(packaged_model_directory())
    assert smollm2.eos_token_id is not None
    assert TokenTexts(smollm2)(smollm2.eos_token_id) == "<|im_end|>"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert TokenTexts(None)(5) == ""
