"""`choice`: the output is one of the given labels.

The labels' tokens form a trie. A sequence may only sample the children of its node; where one path is left, the
rest of the label is forced without sampling, and the sequence is complete: no step is spent on what is certain,
nor on an end-of-sequence token. A label that is a prefix of another needs EOS to say that it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TrieNode:
    children: dict[int, TrieNode] = field(default_factory=dict)
    is_label: bool = False


def build_choice_trie(labels: Sequence[Sequence[int]], eos_token_id: int | None) -> TrieNode:
    """The trie of the labels' token ids.

    Raises:
        InvalidRequest: a label is a prefix of another, and there is no EOS to tell them apart.
    """
    root = TrieNode()
    for token_ids in labels:
        node = root
        for token_id in token_ids:
            node = node.children.setdefault(token_id, TrieNode())
        node.is_label = True
    pending = [root]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        if node.is_label and node.children:
            if eos_token_id is None:
                raise InvalidRequest("a choice label is a prefix of another, and the model has no EOS token")
            node.children[eos_token_id] = TrieNode(is_label=True)
    return root


class ChoiceGrammar:
    """One sequence's place in a choice trie (a `Grammar`)."""

    def __init__(self, root: TrieNode) -> None:
        self._node = root

    def allowed_token_ids(self) -> list[int]:
        return list(self._node.children)

    def token_mask(self) -> None:
        return None

    def advance(self, token_id: int) -> list[int]:
        """Take a sampled (or replayed) token; returns the tokens that must follow it."""
        self._node = self._node.children[token_id]
        return self._follow_only_path()

    def replay(self, token_ids: Sequence[int]) -> None:
        """Go where an earlier run had got. Raises `InvalidRequest` when these tokens are no way through the trie."""
        remaining = list(token_ids)
        while remaining:
            token_id = remaining.pop(0)
            if token_id not in self._node.children:
                raise InvalidRequest("the checkpoint's tokens are not what structured_outputs allows")
            forced = self.advance(token_id)
            if remaining[: len(forced)] != forced:
                raise InvalidRequest("the checkpoint's tokens end within what structured_outputs forces")
            del remaining[: len(forced)]

    def _follow_only_path(self) -> list[int]:
        forced = []
        while len(self._node.children) == 1:
            token_id, self._node = next(iter(self._node.children.items()))
            forced.append(token_id)
        return forced

    @property
    def is_complete(self) -> bool:
        return not self._node.children

    @property
    def failure(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CompiledChoice:
    """A trie, shared and read-only, as the beginning of any number of outputs."""

    root: TrieNode

    def start(self) -> ChoiceGrammar:
        return ChoiceGrammar(self.root)


class ChoiceCompiler:
    """Tokenises labels and caches their tries. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._trie = lru_cache(maxsize=256)(self._build)

    def compile(self, labels: tuple[str, ...], prompt_token_ids: Sequence[int]) -> CompiledChoice:
        """Raises `InvalidRequest`: see `build_choice_trie`."""
        return CompiledChoice(self._trie(labels, prompt_token_ids[-1] if prompt_token_ids else None))

    def _build(self, labels: tuple[str, ...], last_token_id: int | None) -> TrieNode:
        return build_choice_trie([self._encode(label, last_token_id) for label in labels], self._eos_token_id)

    def _encode(self, label: str, last_token_id: int | None) -> list[int]:
        """The label's canonical tokens after the prompt's last token.

        A tokenizer may write a text's first word differently at the start than after something, so the label is
        encoded behind the last prompt token, wherever that token survives the concatenation unchanged.
        """
        alone = self._tokenizer.encode(label, add_special_tokens=False)
        if last_token_id is not None:
            anchor = self._tokenizer.decode([last_token_id], skip_special_tokens=False)
            anchored = self._tokenizer.encode(anchor + label, add_special_tokens=False)
            if anchored[:1] == [last_token_id] and len(anchored) > 1:
                alone = anchored[1:]
        if not alone:
            raise InvalidRequest("a choice label has no tokens")
        return alone
