"""The grammars of this package, which can also replay the tokens of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagemill.engine.scheduling.request import Grammar


class ReplayedGrammar(Grammar, Protocol):
    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by an earlier run's tokens. Raises `InvalidRequest` if they do not match."""
        ...
