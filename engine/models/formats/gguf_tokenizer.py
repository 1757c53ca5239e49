"""What transformers leaves out when it reads a tokenizer from a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# By `tokenizer.ggml.pre`, as the publishers' tokenizer.json cut a text before the merges.
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}


def correct_tokenizer(tokenizer: Any, reader: Any) -> None:
    """Cut a text as the file says: transformers takes GPT-2's pattern for all, which joins digits in other ways."""
    field = reader.get_field("tokenizer.ggml.pre")
    kind = "" if field is None else str(field.contents())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[kind]), "isolated")
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        by_pattern = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_pattern])
