"""Determines whether a tokenizer.json needs time and memory in proportion to the length of any text.

Such tokenizers encode in the threads of the engine. All others encode in a process with limits (`text_process.py`).
Decoding has no such process: a decoder whose output is not bounded is rejected.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_GROWTH = 1000.0
"""Maximum number of characters that all normalizers together produce from one."""
_MAX_STEPS = 16
_MAX_WORD = 1000
_MAX_TRIES = 100
_LONGEST_FORM = 18.0
"""Maximum number of characters that compatibility normalization produces from one."""
_STEADY_NORMALIZERS = {"NFC": 3.0, "NFD": 4.0, "NFKC": _LONGEST_FORM, "NFKD": _LONGEST_FORM, "Lowercase": 3.0,
                       "BertNormalizer": 12.0, "StripAccents": 1.0, "Strip": 1.0, "Nmt": 1.0}  # fmt: skip
_STEADY_SPLITS = {"ByteLevel", "Whitespace", "WhitespaceSplit", "Metaspace", "Digits", "Punctuation", "FixedLength",
                  "BertPreTokenizer", "UnicodeScripts", "CharDelimiterSplit"}  # fmt: skip
_STEADY_ENDS = {"ByteLevel", "RobertaProcessing", "BertProcessing", "TemplateProcessing"}
_STEADY_DECODERS = {
    "ByteLevel",
    "BPEDecoder",
    "CTC",
    "Fuse",
    "ByteFallback",
    "Metaspace",
    "WordPiece",
    "Strip",
}

_SPACES = {r"\s+", r"\s++"}
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_FOLLOWED_UP: dict[str, set[str]] = {
    r"\s*[\r\n]+": _SPACES, r"\s*[\r\n]": _SPACES, r"\s+(?!\S)": _SPACES, r"\s+$": _SPACES,
    r"\s*[\r\n/]+": _SPACES, r"\s++$": _SPACES,
    _WORD: {_CAPITALS}, _WORD + _SUFFIX: {_CAPITALS + _SUFFIX},
}  # fmt: skip
"""Branches of published patterns that backtrack over their matches, and the branches one of which must
match the same characters next: so each character is read only a few times."""
_ATOM = re.compile(
    r"(?:\\[pP]\{\^?[\w ]+\}|\\x\{?[0-9a-fA-F]+\}?|\\[sSdDwWnrtfvhHu]|\\[^a-zA-Z0-9]"
    r"|\[(?:\\.|\[:\w+:\]|[^\]\\])+\]|[^\\\[\](){}|?*+^$])"
    r"(?P<times>[?*+]|\{\d+(?:,\d*)?\})?\+?"
)
_WORDS = re.compile(r"\(\?i?:(?:\[[\w']+\]|\\?[^()\\\[\]{}?*+^$])+\)(?P<times>\?)?\+?")
"""A group of literal words, possibly optional."""


def unbounded_part(content: Mapping[str, Any]) -> str | None:
    """Return the part of a tokenizer.json that makes the cost of encoding unknown; None if it is known."""
    try:
        checks: tuple[tuple[str, Callable[[Any], bool]], ...] = (
            ("normalizer", lambda part: growth(part) <= MAX_GROWTH),
            ("pre_tokenizer", _splits_steadily),
            ("model", _is_steady_model),
            ("post_processor", _ends_steadily),
        )
        for name, is_known in checks:
            part = content.get(name)
            if part is not None and not is_known(part):
                return name
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, struct.error):
        return name
    return None


def is_decoder_bounded(content: Mapping[str, Any]) -> bool:
    """Return whether the decoder of a tokenizer.json produces bounded text per token."""
    try:
        return content.get("decoder") is None or _decoder_growth(content["decoder"]) <= MAX_GROWTH
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return False


def growth(normalizer: Any) -> float:
    """Return the maximum number of characters that a normalizer produces from one; infinity if unknown."""
    product = 1.0
    for step in _steps(normalizer, "normalizers"):
        match step["type"]:
            case "Prepend":
                product *= 1 + len(step["prepend"])
            case "Replace":
                product *= _replacement(step)
            case "Precompiled":
                product *= _longest_replacement(step["precompiled_charsmap"])
            case kind:
                product *= _STEADY_NORMALIZERS.get(kind, float("inf"))
    return product


def is_linear(pattern: str) -> bool:
    """Return whether a pattern finds its matches without backtracking.

    In each branch, everything after the first unbounded repetition must be optional, so that it cannot fail.
    """
    branches = set(_branches(pattern))
    return all(_is_linear_branch(branch) or branches & _FOLLOWED_UP.get(branch, set()) for branch in branches)


def _is_linear_branch(branch: str) -> bool:
    place, is_open, bounded = 0, False, 1
    while place < len(branch):
        found = _ATOM.match(branch, place) or _WORDS.match(branch, place)
        if found is None or found.end() == place:
            return False
        least, most = _times(found["times"])
        if is_open and least > 0:
            return False
        is_open = is_open or most is None
        bounded *= max(least, most - least + 1) if most is not None else 1 + least
        place = found.end()
    return place > 0 and bounded <= _MAX_TRIES


def _times(text: str | None) -> tuple[int, int | None]:
    match text:
        case None | "":
            return 1, 1
        case "?":
            return 0, 1
        case "*":
            return 0, None
        case "+":
            return 1, None
    least, comma, most = text.strip("{}").partition(",")
    return int(least), (int(most) if most else None) if comma else int(least)


def _branches(pattern: str) -> Iterator[str]:
    """Yield the alternatives at the top level."""
    depth = start = place = 0
    in_class = False
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            yield pattern[start:place]
            start = place + 1
        place += 1
    yield pattern[start:]


def _steps(part: Any, name: str) -> list[Any]:
    """Return the steps of a sequence, or a single step as a list."""
    if part["type"] != "Sequence":
        return [part]
    found = [step for inner in part[name] for step in _steps(inner, name)]
    if len(found) > _MAX_STEPS:
        raise ValueError("too many steps")
    return found


def _replacement(step: Any) -> float:
    pattern, content = step["pattern"], step["content"]
    if pattern.get("String"):
        return max(1.0, len(content) / len(pattern["String"]))
    if pattern.get("Regex") and is_linear(pattern["Regex"]):
        return 1.0 + len(content)
    return float("inf")


def _longest_replacement(charsmap: str) -> float:
    """Return the length of the longest text in SentencePiece's table of replacements."""
    table = base64.b64decode(charsmap)
    (size,) = struct.unpack_from("<I", table)
    return float(max(_LONGEST_FORM, *map(len, table[4 + size :].split(b"\0"))))


def _splits_steadily(part: Any) -> bool:
    for step in _steps(part, "pretokenizers"):
        if step["type"] == "Split":
            pattern = step["pattern"]
            if not (pattern.get("String") or (pattern.get("Regex") and is_linear(pattern["Regex"]))):
                return False
        elif step["type"] not in _STEADY_SPLITS:
            return False
    return True


def _is_steady_model(model: Any) -> bool:
    match model.get("type"):
        case "WordPiece":
            return int(model.get("max_input_chars_per_word", 100)) <= _MAX_WORD
        case "Unigram":
            return max(len(piece) for piece, _ in model["vocab"]) <= _MAX_WORD
    return model.get("type") in ("BPE", "WordLevel", None)


def _ends_steadily(part: Any) -> bool:
    for step in _steps(part, "processors"):
        if step["type"] not in _STEADY_ENDS:
            return False
        if step["type"] == "TemplateProcessing":
            pieces = [*step["single"], *step["pair"]]
            ids = sum(len(token["ids"]) for token in step["special_tokens"].values())
            if len(pieces) > _MAX_STEPS or ids > _MAX_WORD:
                return False
    return True


def _decoder_growth(decoder: Any) -> float:
    product = 1.0
    for step in _steps(decoder, "decoders"):
        product *= _replacement(step) if step["type"] == "Replace" else 1.0
        if step["type"] not in _STEADY_DECODERS | {"Replace"}:
            return float("inf")
    return product
