"""The model's tokens as the grammar library wants them, in a form that also travels to the probe's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import llguidance

from pagemill.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """What token masks are made from."""

    tokenizer_json: str
    """A Hugging Face tokenizer.json."""
    vocab_size: int
    """Of the model: it may be padded past the tokenizer's."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> GrammarVocabulary | None:
        """None: nobody can say which bytes the tokens stand for, or nothing ends a text."""
        tokenizer_json = tokenizer.to_json()
        # Configurations name EOS tokens that their tokenizer does not have.
        eos = tuple(token for token in eos_token_ids if token < min(vocab_size, tokenizer.vocab_size))
        return None if tokenizer_json is None or not eos else cls(tokenizer_json, vocab_size, eos)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> GrammarVocabulary:
        fields = json.loads(text)
        return cls(fields["tokenizer_json"], fields["vocab_size"], tuple(fields["eos_token_ids"]))

    def build(self) -> llguidance.LLTokenizer:
        """Takes up to a second and some memory where the vocabulary is large: build it once."""
        return llguidance.LLTokenizer(
            self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
        )
