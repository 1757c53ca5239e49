"""Tokenizers in GGUF files: SentencePiece's, and the parts of others that transformers omits."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers, processors

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.text.sentencepiece_model import SentencePieceModel
from pagemill.engine.text.tiktoken_vocabulary import QWEN_PATTERN

_LLAMA3_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
# Pre-tokenization by `tokenizer.ggml.pre`, as in the publishers' tokenizer.json.
_PATTERNS = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "llama-v3": _LLAMA3_PATTERN,
    "qwen2": QWEN_PATTERN,
}
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Kinds that split off each digit, and split the rest by GPT-2's pattern."""
_BY_TRANSFORMERS = frozenset(
    {
        "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "dbrx", "smaug-bpe", "tekken",
        "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "qwen35", "gpt-4o", "llama4", "kanana2", "talkie",
        "minimax-m2",
    }
)  # fmt: skip
_GPT2 = frozenset({"", "default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling"})
_FIELDS = frozenset(
    {
        "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "merges", "model", "pre",
        "precompiled_charsmap", "remove_extra_whitespaces", "scores", "token_type", "token_type_count", "tokens",
        "eos_token_ids",
    }
)  # fmt: skip
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<end_of_utterance>",
     "<|return|>", "<|call|>", "<EOT>"}
)  # fmt: skip
"""Control tokens that end an output in files without the fields for them."""
_CONTROL = 3

_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Kinds that match entire words of the vocabulary before merges, and whose texts start with BOS by default."""


def _kind(reader: Any) -> str:
    return str(_value(reader, "pre", ""))


def _value(reader: Any, name: str, default: Any = None) -> Any:
    field = reader.get_field(f"tokenizer.ggml.{name}")
    return default if field is None else field.contents()


def check_tokenizer_field(key: str, reader: Any, name: str) -> None:
    """Check that a field of the tokenizer is used or has no effect. Raises ModelLoadError."""
    field = key.removeprefix("tokenizer.ggml.")
    is_known = field in _FIELDS or field.endswith("_token_id") or not key.startswith("tokenizer.ggml.")
    is_certain = field not in ("pre", "add_eos_token", "add_sep_token")
    if is_known and (is_certain or _value(reader, "model") != "gpt2"):
        return
    value = reader.get_field(key).contents()
    if is_certain or (
        value not in _PATTERNS.keys() | _SINGLE_DIGITS | _BY_TRANSFORMERS | _GPT2 if field == "pre" else value
    ):
        raise ModelLoadError(
            f"{name}: {key} = {str(value)[:60]} is not supported; give the original checkpoint"
        )


def end_token_ids(reader: Any) -> list[int]:
    """Return the ids of the tokens that end an output: end of text, of turn and of message.

    Older files only specify the first. As in llama.cpp, the others are then found by their names.
    """
    found: list[int] = []
    for name in ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id"):
        value = _value(reader, name, [])
        found += [int(one) for one in (value if isinstance(value, list) else [value])]
    if all(_value(reader, name) is None for name in ("eos_token_ids", "eot_token_id", "eom_token_id")):
        tokens, types = _value(reader, "tokens", []), _value(reader, "token_type", [])
        ends = {
            token: number
            for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _ENDS
        }
        if ends.keys() >= {"<|return|>", "<|call|>"}:
            ends.pop("<|end|>", None)  # in gpt-oss, a message is not the end
        found += ends.values()
    return list(dict.fromkeys(found))


def add_bos(tokenizer: Any, reader: Any) -> None:
    """Put BOS before a text if the file specifies it; files of Llama 3 may omit that field."""
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
    """Split a text as the file specifies: transformers uses GPT-2's pattern for all, which joins digits differently.

    Some versions of transformers also use BOS as EOS, remove spaces before punctuation, and read the tokens of a
    byte-level vocabulary as SentencePiece's.
    """
    for name, token in _special_tokens(reader).items():
        setattr(tokenizer, name, token)
    tokenizer.clean_up_tokenization_spaces = False
    if _value(reader, "model") == "gpt2":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
        tokenizer.backend_tokenizer.model.byte_fallback = False
    kind = _kind(reader)
    if kind in _LLAMA3:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[kind]), "isolated")
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind in _SINGLE_DIGITS:
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
    return model, {name: given for name, given in config.items() if given is not None} | _special_tokens(
        reader
    )


def _special_tokens(reader: Any) -> dict[str, str]:
    """Return the tokens that the file specifies by id, in the form of tokenizer_config.json."""
    pieces = _value(reader, "tokens", [])
    numbers = {
        f"{name}_token": _value(reader, f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        name: pieces[number]
        for name, number in numbers.items()
        if number is not None and 0 <= number < len(pieces)
    }
