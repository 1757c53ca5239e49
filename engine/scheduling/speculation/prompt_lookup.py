"""Predicts a sequence's next tokens from an earlier occurrence of its last ones.

Saxena's prompt lookup: outputs that extract, quote, correct or rewrite repeat long parts of their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

MIN_MATCH = 3
"""Tokens that must have occurred before, in this order."""
MAX_INDEXED = 8192
"""Maximum number of tokens of a sequence whose positions are indexed, at about 110 bytes each."""
_LONGEST = 15


class Acceptance:
    """The share of correct predictions, by the number of matching tokens.

    Measured on every prediction, drafted or not, so it is known before drafts pay and does not cost any.
    """

    def __init__(self) -> None:
        self._shares = [0.5] * (_LONGEST.bit_length() + 1)

    def expected(self, num_matched: int) -> float:
        return self._shares[min(num_matched, _LONGEST).bit_length()]

    def observe(self, num_matched: int, *, came_true: bool) -> None:
        group = min(num_matched, _LONGEST).bit_length()
        self._shares[group] += 0.05 * (came_true - self._shares[group])


class PromptLookup:
    """One sequence's tokens by the `MIN_MATCH` before them."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """Tokens -> the position after their latest occurrence."""
        self._source = 0
        """The position of the token that is predicted next."""
        self.num_matched = 0
        """Number of tokens before it that match the sequence's last ones; 0: nothing is predicted."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: SequenceType[int]) -> None:
        """Append the tokens that follow those already indexed."""
        if not self._tokens:
            self._begin(token_ids)
            return
        for token in token_ids:
            self._append(token)

    def predict(self, count: int) -> list[int]:
        """Return up to `count` predicted tokens; a repetition in progress is continued."""
        if not self.num_matched:
            return []
        period = len(self._tokens) - self._source
        return [self._tokens[self._source + index % period] for index in range(count)]

    def _begin(self, token_ids: SequenceType[int]) -> None:
        tokens = self._tokens
        tokens.extend(token_ids)
        head = tokens[: min(MAX_INDEXED, len(tokens) - 1)]  # the last position is looked up first
        self._next = {
            key: end for end, key in enumerate(zip(head, head[1:], head[2:], strict=False), MIN_MATCH)
        }
        self._look_up()

    def _append(self, token: int) -> None:
        tokens = self._tokens
        if self.num_matched:
            came_true = tokens[self._source] == token
            self._acceptance.observe(self.num_matched, came_true=came_true)
            self._source += 1
            self.num_matched = self.num_matched + 1 if came_true else 0
        tokens.append(token)
        if not self.num_matched:
            self._look_up()
        elif len(tokens) <= MAX_INDEXED:
            self._next[tuple(tokens[-MIN_MATCH:])] = len(tokens)

    def _look_up(self) -> None:
        """Find an earlier occurrence of the last tokens, and index their current position."""
        tokens = self._tokens
        key = tuple(tokens[-MIN_MATCH:])
        found = self._next.get(key)
        if len(tokens) <= MAX_INDEXED:
            self._next[key] = len(tokens)
        if found is None:
            return
        self._source, length = found, MIN_MATCH
        while length < _LONGEST and length < found and tokens[found - 1 - length] == tokens[-1 - length]:
            length += 1
        self.num_matched = length
