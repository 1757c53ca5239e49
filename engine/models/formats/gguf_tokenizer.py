"""Tokenizers in GGUF files: SentencePiece's, and what transformers leaves out of the others."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

from pagemill.engine.text.sentencepiece_model import SentencePieceModel
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


def sentencepiece_of(reader: Any) -> tuple[SentencePieceModel, dict[str, Any]]:
    """Return the file's SentencePiece model, and its part of tokenizer_config.json."""

    def value(name: str, default: Any = None) -> Any:
        field = reader.get_field(f"tokenizer.{name}")
        return default if field is None else field.contents()

    pieces = value("ggml.tokens")
    model = SentencePieceModel(
        pieces=pieces,
        scores=value("ggml.scores"),
        types=value("ggml.token_type"),
        algorithm="bpe",
        adds_prefix=value("ggml.add_space_prefix", True),
    )
    config = {
        "add_bos_token": value("ggml.add_bos_token", True),
        "add_eos_token": value("ggml.add_eos_token", False),
        "chat_template": value("chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = value(f"ggml.{key}_token_id")
        if number is not None and 0 <= number < len(pieces):
            config[f"{name}_token"] = pieces[number]
    return model, {name: given for name, given in config.items() if given is not None}
