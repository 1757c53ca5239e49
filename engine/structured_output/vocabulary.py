"""The model's tokens as the grammar library needs them, in a form that can be sent to another process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import llguidance

from pagemill.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The tokens that masks are made for."""

    tokenizer_json: str
    """A Hugging Face tokenizer.json."""
    vocab_size: int
    """The model's: it may be padded past the tokenizer's."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> GrammarVocabulary | None:
        """Return None if the tokens' bytes are unknown, or if there is no EOS."""
        tokenizer_json = tokenizer.to_json()
        # Configurations may name EOS tokens that their tokenizer lacks.
        eos = tuple(token for token in eos_token_ids if token < min(vocab_size, tokenizer.vocab_size))
        return None if tokenizer_json is None or not eos else cls(tokenizer_json, vocab_size, eos)

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
