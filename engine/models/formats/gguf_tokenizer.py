"""What transformers leaves out when it reads a tokenizer from a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

from pagemill.engine.text.tiktoken_vocabulary import QWEN_PATTERN

_LLAMA3_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
# By `tokenizer.ggml.pre`, as the publishers' tokenizer.json cut a text before the merges.
_PATTERNS = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "llama-v3": _LLAMA3_PATTERN,
    "qwen2": QWEN_PATTERN,
}


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
