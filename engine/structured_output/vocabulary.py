"""The model's tokens for the grammar library, in a form that can be sent to another process."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import llguidance

from pagemill.engine.text.tokenizer import Tokenizer

_ADDED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/', re.DOTALL)
_UNWRITABLE = "\ufdd0"
"""A code point that does not occur in texts."""


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The tokens covered by masks."""

    tokenizer_json: str
    """A Hugging Face tokenizer.json."""
    vocab_size: int
    """The model's vocabulary size, which may be padded beyond the tokenizer's."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> GrammarVocabulary | None:
        """Return None if the tokens' bytes are unknown, or if there is no EOS."""
        tokenizer_json = tokenizer.to_json()
        # Configurations may contain EOS tokens that their tokenizer lacks.
        eos = tuple(token for token in eos_token_ids if token < min(vocab_size, tokenizer.vocab_size))
        if tokenizer_json is None or not eos:
            return None
        if tokenizer.vocab_size > vocab_size or any(
            token["id"] >= vocab_size for token in _added_tokens(tokenizer_json)
        ):
            tokenizer_json = _without_tokens_from(vocab_size, tokenizer_json)
        return cls(tokenizer_json, vocab_size, eos)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> GrammarVocabulary:
        fields = json.loads(text)
        return cls(fields["tokenizer_json"], fields["vocab_size"], tuple(fields["eos_token_ids"]))

    def build(self) -> llguidance.LLTokenizer:
        """Build the library's tokenizer. Takes up to a second, and memory, if the vocabulary is large."""
        return llguidance.LLTokenizer(
            self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
        )

    def special_names(self) -> tuple[str, ...]:
        """Return the names of the special tokens, which texts omit."""
        added = _added_tokens(self.tokenizer_json)
        return tuple(token["content"] for token in added if token["special"] and token["content"])

    def without_names(self) -> GrammarVocabulary:
        """Return a vocabulary for texts with names of special tokens, which it spells out.

        The library encodes forced texts, and would mistake such a name for the token.
        """
        described = json.loads(self.tokenizer_json)
        renamed = {name: _UNWRITABLE + name for name in self.special_names()}
        for token in described["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        model: dict[str, Any] = described["model"]
        if isinstance(vocab := model.get("vocab"), dict):
            model["vocab"] = {renamed.get(piece, piece): number for piece, number in vocab.items()}
        elif vocab is not None:
            model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        return replace(self, tokenizer_json=json.dumps(described))


def _added_tokens(tokenizer_json: str) -> list[dict[str, Any]]:
    """Return the added tokens, without reading the rest of the file."""
    found = _ADDED.search(tokenizer_json)
    added: list[dict[str, Any]] = (
        json.JSONDecoder().raw_decode(tokenizer_json, found.end())[0] if found else []
    )
    return added


def _without_tokens_from(size: int, tokenizer_json: str) -> str:
    """Return a tokenizer without the ids from `size` on, for which the model has no logits.

    Fine-tuned models often add a padding token to the tokenizer alone.
    """
    described = json.loads(tokenizer_json)
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < size]
    model: dict[str, Any] = described["model"]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = kept = {piece: number for piece, number in vocab.items() if number < size}
        pairs = (
            (merge, merge.split(" ") if isinstance(merge, str) else merge)
            for merge in model.get("merges", ())
        )
        if "merges" in model:
            model["merges"] = [merge for merge, pair in pairs if "".join(pair) in kept]
    elif vocab is not None:
        model["vocab"] = vocab[:size]
    return json.dumps(described)


def has_name(kind: str, text: str, names: tuple[str, ...]) -> bool:
    """Return True if a schema has the name of a special token as text.

    A Lark grammar can also refer to the token, by its name outside of quotes; then the result is False.
    """
    if kind == "grammar" and any(name in _QUOTED.sub("", text) for name in names):
        return False
    plain = text.replace("\\", "")
    return any(name in plain for name in names)
