"""`choice`: the output is one of the given labels.

The labels' tokens form a trie. A sequence can only sample the children of its node. When one path remains,
the rest of the label is forced without sampling, and the sequence is complete: forced tokens and EOS do not
require a step. A label that is a prefix of another needs EOS to mark its end.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from pagemill.common.sampling_fields import LabelProbs
from pagemill.engine.byte_cache import ByteCache, text_bytes
from pagemill.engine.errors import InvalidRequest, SchemaTooComplex
from pagemill.engine.scheduling.label_tree import LabelTree
from pagemill.engine.text.tokenizer import Tokenizer

MAX_LABEL_TOKENS = 1024
"""Maximum per label. A label is forced completely once it is chosen; a longer one is a text, not a label."""
MAX_CHOICE_TOKENS = 65_536
"""Maximum for all labels together: 1,024 labels of 64 tokens. Half a second to tokenize, 256 KiB to store."""
_CACHE_BYTES = 16 << 20


class ChoiceTrie:
    """Labels as sorted, concatenated token sequences: a node is a range of labels and the length they share."""

    def __init__(self, labels: Iterable[Sequence[int]], eos_token_id: int | None) -> None:
        """
        Args:
            labels: token ids, none empty, in any order.
            eos_token_id: the token that ends a label that is a prefix of another.

        Raises:
            InvalidRequest: a label is a prefix of another, and there is no EOS to distinguish them.
        """
        self._tokens = array("I")
        self._starts = array("I", [0])
        self._eos_token_id = eos_token_id
        previous: Sequence[int] = ()
        for label in sorted(array("I", label) for label in labels):
            if label == previous:
                continue
            if eos_token_id is None and previous and label[: len(previous)] == previous:
                raise InvalidRequest("a choice label is a prefix of another, and the model has no EOS token")
            self._tokens.extend(label)
            self._starts.append(len(self._tokens))
            previous = label
        self.num_labels = len(self._starts) - 1
        self.root = self.children(0, self.num_labels, 0)

    @property
    def num_bytes(self) -> int:
        return sum(map(sys.getsizeof, (self, self._tokens, self._starts, self.root))) + 256 * len(self.root)

    def children(self, low: int, high: int, depth: int) -> dict[int, tuple[int, int]]:
        """Map each next token to its labels within low..high-1, which share their first `depth` tokens.

        EOS maps to an empty range: the label that it ends is complete. A single label at its end has no children.
        """
        tokens, starts = self._tokens, self._starts
        has_ended = starts[low] + depth == starts[low + 1]  # the shortest comes first
        begin = low + 1 if has_ended else low
        found: dict[int, tuple[int, int]] = {}
        while begin < high:
            token_id = tokens[starts[begin] + depth]
            end = bisect_right(
                range(high), token_id, begin, high, key=lambda label: tokens[starts[label] + depth]
            )
            found[token_id] = (begin, end)
            begin = end
        if has_ended and found:
            assert self._eos_token_id is not None
            found[self._eos_token_id] = (low, low)
        return found

    def shared(self, low: int, high: int, depth: int) -> list[int]:
        """Return the next tokens shared by all labels low..high-1."""
        first, last = (
            self._tokens[self._starts[label] + depth : self._starts[label + 1]].tolist()
            for label in (low, high - 1)
        )
        if high - low == 1:
            return first
        ends = (i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
        return first[: next(ends, min(len(first), len(last)))]


class ChoiceGrammar:
    """One sequence's position in a choice trie (a `Grammar`)."""

    def __init__(self, trie: ChoiceTrie) -> None:
        self._trie = trie
        self._depth = 0
        self._children = trie.root

    def allowed_token_ids(self) -> list[int]:
        return list(self._children)

    def token_mask(self) -> None:
        return None

    def prepare(self, token_id: int) -> None:
        """Do nothing: `advance` does not need preparation."""

    @property
    def is_ready(self) -> bool:
        return True

    def advance(self, token_id: int) -> list[int]:
        """Accept a sampled (or replayed) token; return the tokens that must follow it."""
        forced: list[int] = []
        while True:
            low, high = self._children[token_id]
            self._depth += 1
            if low == high:  # EOS
                self._children = {}
                return forced
            shared = self._trie.shared(low, high, self._depth)
            forced += shared
            self._depth += len(shared)
            self._children = self._trie.children(low, high, self._depth)
            if len(self._children) != 1:
                return forced
            (token_id,) = self._children  # a label is followed by EOS if another continues it
            forced.append(token_id)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by an earlier run's tokens. Raises `InvalidRequest` if they are not a path in the trie."""
        position = 0
        while position < len(token_ids):
            token_id = token_ids[position]
            if token_id not in self._children:
                raise InvalidRequest("the checkpoint's tokens are not what structured_outputs allows")
            forced = self.advance(token_id)
            position += 1 + len(forced)
            if list(token_ids[position - len(forced) : position]) != forced:
                raise InvalidRequest("the checkpoint's tokens end within what structured_outputs forces")

    @property
    def may_sample_again(self) -> bool:
        return any(high - low > 1 for low, high in self._children.values())

    @property
    def is_complete(self) -> bool:
        return not self._children

    @property
    def failure(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CompiledChoice:
    """A shared, immutable trie: the start of any number of outputs."""

    trie: ChoiceTrie

    def start(self) -> ChoiceGrammar:
        return ChoiceGrammar(self.trie)


class ChoiceCompiler:
    """Tokenizes labels and caches their tries and trees. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._plain: Any = None
        """The `tokenizers.Tokenizer` that reads special tokens as text."""
        self._tries: ByteCache[tuple[tuple[str, ...], int | None], ChoiceTrie] = ByteCache(
            _CACHE_BYTES, lambda key, trie: text_bytes(key[0]) + trie.num_bytes
        )
        self._trees: ByteCache[tuple[tuple[str, ...], int | None, LabelProbs], LabelTree] = ByteCache(
            _CACHE_BYTES, lambda key, tree: text_bytes(key[0]) + tree.num_bytes
        )

    def compile(self, labels: tuple[str, ...], prompt_token_ids: Sequence[int]) -> CompiledChoice:
        """Raise `InvalidRequest`, see `ChoiceTrie`; `SchemaTooComplex` if the labels have too many tokens."""
        key = labels, prompt_token_ids[-1] if prompt_token_ids else None
        trie = self._tries.get(key)
        if trie is None:
            trie = ChoiceTrie(self._encode_all(*key), self._eos_token_id)
            self._tries.put(key, trie)
        return CompiledChoice(trie)

    def tree(self, labels: tuple[str, ...], prompt_token_ids: Sequence[int], kind: LabelProbs) -> LabelTree:
        """Return the tree of the labels' tokens as output by a plain choice, with EOS after a label that others
        continue.

        Raises:
            InvalidRequest: as `compile`; or two labels have the same tokens.
        """
        last = prompt_token_ids[-1] if prompt_token_ids else None
        tree = self._trees.get((labels, last, kind))
        if tree is None:
            tree = LabelTree(self._told_apart([tuple(ids) for ids in self._encode_all(labels, last)]), kind)
            self._trees.put((labels, last, kind), tree)
        return tree

    def _told_apart(self, labels: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the labels, with EOS after those that others continue."""
        order = sorted(labels)
        continued = {one for one, other in pairwise(order) if other[: len(one)] == one}
        if len(set(labels)) < len(labels):
            raise InvalidRequest("label_probs: two labels of the choice have the same tokens")
        if not continued:
            return labels
        if self._eos_token_id is None:
            raise InvalidRequest("a choice label is a prefix of another, and the model has no EOS token")
        return [(*label, self._eos_token_id) if label in continued else label for label in labels]

    def _encode_all(self, labels: tuple[str, ...], last_token_id: int | None) -> Iterator[Sequence[int]]:
        anchor = ""
        if last_token_id is not None:
            anchor = self._tokenizer.decode([last_token_id], skip_special_tokens=False)
        num_tokens = 0
        for label in labels:
            token_ids = self._encode(label, anchor, last_token_id)
            num_tokens += len(token_ids)
            if len(token_ids) > MAX_LABEL_TOKENS or num_tokens > MAX_CHOICE_TOKENS:
                raise SchemaTooComplex(
                    f"structured_outputs.choice: a label has more than {MAX_LABEL_TOKENS} tokens, or all labels "
                    f"together have more than {MAX_CHOICE_TOKENS}"
                )
            yield token_ids

    def _encode(self, label: str, anchor: str, last_token_id: int | None) -> list[int]:
        """Return the label's canonical tokens after the prompt's last token, which is `anchor` as text.

        A tokenizer may write a text's first word differently at the start than after other text, so the label
        is encoded behind the last prompt token if that token survives the concatenation unchanged.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        token_ids = _behind(anchor, label, last_token_id, encode)
        if self._has_special(token_ids):
            token_ids = _behind(anchor, label, last_token_id, self._spelled_out)
        if not token_ids:
            raise InvalidRequest("a choice label has no tokens")
        return token_ids

    def _has_special(self, token_ids: Sequence[int]) -> bool:
        """Return True if texts would omit a token."""
        decode = self._tokenizer.decode
        return decode(token_ids) != decode(token_ids, skip_special_tokens=False)

    def _spelled_out(self, text: str) -> list[int]:
        """Encode a text in which special tokens are read as plain text."""
        if self._plain is None:
            source = None if getattr(self._tokenizer, "is_limited", False) else self._tokenizer.to_json()
            if source is None:
                raise InvalidRequest(
                    "a choice label contains the name of a special token, which this tokenizer cannot spell out"
                )
            from tokenizers import Tokenizer as Plain

            self._plain = Plain.from_str(source)
            self._plain.encode_special_tokens = True
        token_ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return token_ids


def _behind(
    anchor: str, label: str, last_token_id: int | None, encode: Callable[[str], list[int]]
) -> list[int]:
    token_ids = encode(anchor + label)
    if last_token_id is None:
        return token_ids
    if token_ids[:1] == [last_token_id] and len(token_ids) > 1:
        return token_ids[1:]
    return encode(label)
