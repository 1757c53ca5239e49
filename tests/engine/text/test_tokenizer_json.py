"""The tokenizer as the grammar library receives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_tokenizer_is_written_without_padding_and_truncation(tmp_path: Path, is_cut: bool) -> None:
    backend = Tokenizer.from_str(ByteTokenizer().to_json())
    if is_cut:
        backend.enable_padding(length=8)
        backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    written = json.loads(HuggingFaceTokenizer(tmp_path).to_json() or "")
    assert written.get("padding") is None
    assert written.get("truncation") is None
    assert written["model"]["vocab"] == json.loads(ByteTokenizer().to_json())["model"]["vocab"]
