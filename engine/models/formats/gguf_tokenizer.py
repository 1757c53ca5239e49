"""Tokenizers in GGUF files: SentencePiece's, and what transformers leaves out of the others."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers, processors

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


_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Kinds whose tokens are whole words of the vocabulary before merges, and whose texts begin with BOS by default."""


def _kind(reader: Any) -> str:
    field = reader.get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def add_bos(tokenizer: Any, reader: Any) -> None:
    """Put BOS before a text if the file says so; files of Llama 3 may leave that out."""
    field = reader.get_field("tokenizer.ggml.add_bos_token")
    is_added = _kind(reader) in _LLAMA3 if field is None else bool(field.contents())
    bos = tokenizer.bos_token
    backend = tokenizer.backend_tokenizer
    if not is_added or bos is None or backend.encode("a").ids[:1] == [tokenizer.bos_token_id]:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def correct_tokenizer(tokenizer: Any, reader: Any) -> None:
    """Cut a text as the file says: transformers takes GPT-2's pattern for all, which joins digits in other ways."""
    kind = _kind(reader)
    if kind in _LLAMA3:
        tokenizer.backend_tokenizer.model.ignore_merges = True
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
