"""Tokenizers that encode in the engine's threads: published ones do, and none whose cost a text can raise."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.known_cost import growth, is_decoder_bounded, is_linear, unbounded_part
from pagemill.engine.text.tokenizer import ByteTokenizer

BYTES = json.loads(ByteTokenizer().to_json())
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*"
)


@pytest.mark.parametrize(
    "pattern",
    [
        CL100K, CL100K.replace("{1,3}", ""), O200K, DEEPSEEK, "[一-龥]+", " ", "a{2,5}b?",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+",
    ],
)  # fmt: skip
def test_published_patterns_are_linear(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a|a)*b", "a*a*b", "a+b", "(?:a{1,9}){1,9}b", "a{1,99}a{1,99}b", r"\s*[\r\n]+", r"\s+$", "(?=a+)a",
        r"(a)\1", "[a", "a)|(b", r"\X+", "(?<=a*)b", "a+?b", O200K[:100], "a{5000}",
    ],
)  # fmt: skip
def test_patterns_that_go_back_are_not(pattern: str) -> None:
    assert not is_linear(pattern)


def charsmap(*texts: str) -> str:
    table = struct.pack("<I", 4) + b"\0" * 4 + b"\0".join(text.encode() for text in texts) + b"\0"
    return base64.b64encode(table).decode()


@pytest.mark.parametrize(
    ("normalizer", "most"),
    [
        ({"type": "NFC"}, 3), ({"type": "Prepend", "prepend": "▁"}, 2),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "bcd"}, 3),
        ({"type": "Replace", "pattern": {"Regex": " {2,9}"}, "content": " "}, 2),
        ({"type": "Replace", "pattern": {"Regex": "(a+)+"}, "content": ""}, float("inf")),
        ({"type": "Replace", "pattern": {"String": ""}, "content": "a"}, float("inf")),
        ({"type": "Precompiled", "precompiled_charsmap": charsmap("a", "b" * 500)}, 500),
        ({"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 2}, 324), ({"type": "Later"}, float("inf")),
    ],
)  # fmt: skip
def test_growth(normalizer: Any, most: float) -> None:
    assert growth(normalizer) == most


def test_the_packaged_tokenizer_and_ours_are_known() -> None:
    packaged = json.loads((packaged_model_directory() / "tokenizer.json").read_text())
    for content in (packaged, BYTES):
        assert unbounded_part(content) is None
        assert is_decoder_bounded(content)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 3}), ("normalizer", []),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "a+b"}}), ("pre_tokenizer", {"type": "Later"}),
        ("model", {"type": "Later"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 17}),
        ("model", {"type": "WordPiece", "max_input_chars_per_word": 10**6, "vocab": {}}),
        ("model", {"type": "Unigram", "vocab": [["a" * 2000, 0.0]]}), ("post_processor", {"type": "Later"}),
        ("post_processor", {"type": "TemplateProcessing", "single": [{}] * 99, "pair": [], "special_tokens": {}}),
    ],
)  # fmt: skip
def test_other_parts_are_not(name: str, part: Any) -> None:
    assert unbounded_part(BYTES | {name: part}) == name
    assert not is_decoder_bounded(
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+"}, "content": "b"}}
    )
