"""tiktoken vocabularies (`qwen.tiktoken`) as Hugging Face tokenizers with tiktoken's ids."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.text.byte_level import byte_characters

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_END = "<|endoftext|>"
_QWEN_SPECIAL = (QWEN_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))


def qwen_tokenizer(file: Path) -> Tokenizer:
    """Return Qwen 1's tokenizer: byte-level BPE over text in NFC, and special tokens after the vocabulary."""
    return build_tokenizer(read_ranks(file), QWEN_PATTERN, _QWEN_SPECIAL)


def read_ranks(file: Path) -> list[bytes]:
    """Return the tokens by rank. Raises `ModelLoadError`."""
    ranks: dict[int, bytes] = {}
    try:
        for line in file.read_bytes().splitlines():
            token, rank = line.split()
            ranks[int(rank)] = base64.b64decode(token, validate=True)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelLoadError(f"can't load the tokenizer in {file}: {error}; download it again") from error
    tokens = [ranks[rank] for rank in sorted(ranks)]
    if sorted(ranks) != list(range(len(ranks))) or len(set(tokens)) != len(tokens) or len(tokens) < 256:
        raise ModelLoadError(f"can't load the tokenizer in {file}: it lacks tokens; download it again")
    return tokens


def build_tokenizer(tokens: Sequence[bytes], pattern: str, special: Sequence[str]) -> Tokenizer:
    """Return the tokenizer that splits a text by `pattern` and merges bytes in the order of the tokens' ranks.

    tiktoken merges the neighbors that form the token of the lowest rank, so every way to form a token is a merge.
    """
    known = {token: rank for rank, token in enumerate(tokens)}
    characters = byte_characters()
    names = ["".join(characters[byte] for byte in token) for token in tokens]
    merges = [
        (name[:cut], name[cut:])
        for token, name in zip(tokens, names, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    tokenizer = Tokenizer(BPE(vocab={name: rank for rank, name in enumerate(names)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return tokenizer
