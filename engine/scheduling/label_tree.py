"""The labels of a choice as a token tree, and the label probabilities computed from its branches.

A node of the tree represents the tokens that the model has read: the prompt and a label prefix. Its branches are the
possible next tokens, each with a log-probability. A prefix that labels share is one path, computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pagemill.common.sampling_fields import LabelProbs


@dataclass(frozen=True, slots=True)
class Chain:
    """A path down the tree, for one sequence to compute. It leaves its parent's path after `num_shared` tokens."""

    parent: int | None
    """The number of an earlier chain; None for the first, which starts at the prompt."""
    num_shared: int
    token_ids: tuple[int, ...]
    """All tokens after the prompt, including shared ones. The last one predicts nothing and is not computed."""
    reads: tuple[tuple[int, ...], ...]
    """The branches at each node that this chain is the first to reach: the tokens whose log-probabilities are read.
    Empty for nodes that need none."""

    @property
    def first_read(self) -> int:
        """The number of tokens before its first node."""
        return 0 if self.parent is None else self.num_shared + 1


@dataclass(frozen=True, slots=True)
class LabelScores:
    """The probabilities of all labels, in their original order, and the most probable one (ties: the first)."""

    probs: tuple[float, ...]
    chosen: int
    logprob: float
    """Log-probability of the chosen label, before normalization over all labels or by length."""


@dataclass(slots=True)
class _Node:
    branches: dict[int, _Node] = field(default_factory=dict)
    place: tuple[int, int] = (0, 0)
    """The chain that reads it, and the index of the read."""


class LabelTree:
    """Immutable once built: any number of requests can share it."""

    def __init__(self, labels: Sequence[Sequence[int]], kind: LabelProbs) -> None:
        """
        Args:
            labels: token ids, none empty, none a prefix of another.
            kind: how probabilities follow from tokens, see `LabelProbs`.
        """
        self.labels = [tuple(label) for label in labels]
        self._kind = kind
        paths = _up_to_last_branch(self.labels) if kind == "constrained" else self.labels
        self.num_tokens = sum(map(len, self.labels))
        root = _grow(paths)
        self.chains = self._chains(root)
        self._places = [self._places_of(root, path) for path in paths]

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a label."""
        return max(map(len, self.labels))

    @property
    def num_bytes(self) -> int:
        return 300 * self.num_tokens

    def scores(self, found: Sequence[Sequence[Sequence[float]]]) -> LabelScores:
        """Return the labels' probabilities from log-probabilities, by chain, read and branch."""
        if self._kind == "constrained":
            found = [[_normalised(values) for values in chain] for chain in found]
        sums = [
            math.fsum(found[chain][read][branch] for chain, read, branch in each) for each in self._places
        ]
        scores = sums
        if self._kind == "mean":
            scores = [total / len(label) for total, label in zip(sums, self.labels, strict=True)]
        probs = [math.exp(score) for score in _normalised(scores)]
        chosen = max(range(len(probs)), key=scores.__getitem__)
        return LabelScores(tuple(probs), chosen, sums[chosen])

    def _chains(self, root: _Node) -> list[Chain]:
        chains: list[Chain] = []
        starts: list[tuple[int | None, int, list[int], _Node]] = [(None, 0, [], root)]
        for parent, num_shared, path, start in starts:  # grows as branches are found
            node, path, chain = start, list(path), len(chains)
            reads: list[tuple[int, ...]] = []
            while node.branches:
                node.place = (chain, len(reads))
                is_needed = self._kind != "constrained" or len(node.branches) > 1 or len(self.labels) == 1
                reads.append(tuple(node.branches) if is_needed else ())
                inner = [(token, child) for token, child in node.branches.items() if child.branches]
                for token, child in inner[1:]:
                    starts.append((chain, len(path), [*path, token], child))
                token, node = inner[0] if inner else next(iter(node.branches.items()))
                path.append(token)
            chains.append(Chain(parent, num_shared, tuple(path), tuple(reads)))
        return chains

    def _places_of(self, root: _Node, path: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (chain, read, branch) of the log-probabilities that add up to a label's."""
        places, node = [], root
        for token in path:
            chain, read = node.place
            wanted = self.chains[chain].reads[read]
            if wanted:
                places.append((chain, read, wanted.index(token)))
            node = node.branches[token]
        return places


def _grow(paths: Sequence[Sequence[int]]) -> _Node:
    root = _Node()
    for path in paths:
        node = root
        for token in path:
            node = node.branches.setdefault(token, _Node())
    return root


def _up_to_last_branch(labels: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Cut each label after the token that distinguishes it from all others: later tokens are forced."""
    order = sorted(range(len(labels)), key=labels.__getitem__)
    kept = [1] * len(labels)
    for one, other in pairwise(order):
        pairs = enumerate(zip(labels[one], labels[other], strict=False))
        shared = next(index for index, (left, right) in pairs if left != right)
        kept[one], kept[other] = max(kept[one], shared + 1), max(kept[other], shared + 1)
    return [label[:length] for label, length in zip(labels, kept, strict=True)]


def _normalised(values: Sequence[float]) -> list[float]:
    """Return normalized log-probabilities. Those too low for a float's exponent become probability 0."""
    if not values:
        return []
    peak = max(values)
    total = peak + math.log(math.fsum(math.exp(value - peak) for value in values))
    return [value - total for value in values]
