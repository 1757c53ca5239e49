"""A sequence's grammar in the engine; the schema's process computes the allowed tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagemill.engine.errors import EngineError, InvalidRequest, SchemaTooComplex
from pagemill.engine.structured_output.messages import Answer

REQUEST_LIMIT_S = 2.0
TOKEN_SHARE_S = 0.002
"""Limits of CPU time for a request's masks, in seconds: a base, and an addition per token. Ordinary schemas
take 0.02 to 0.2 ms per token with a vocabulary of 50,000."""
_NUMBERS = itertools.count()


@dataclass(slots=True)
class MaskBudget:
    """CPU time for one request's masks, over all its samples. Replays of earlier tokens do not count."""

    seconds: float = 0.0
    num_tokens: int = 0

    @property
    def is_spent(self) -> bool:
        return self.seconds > REQUEST_LIMIT_S + TOKEN_SHARE_S * self.num_tokens


class Schema(Protocol):
    """Interface of the schema's process for its grammars."""

    @property
    def kind(self) -> str: ...

    @property
    def mask(self) -> bytes:
        """The mask of the first token."""
        ...

    def request(self, grammar: ServedGrammar) -> None:
        """Request a grammar's next state; `answer` or `fail` will be called once."""
        ...


class ServedGrammar:
    """A `Grammar` that becomes ready later."""

    def __init__(self, schema: Schema, budget: MaskBudget) -> None:
        self.number = next(_NUMBERS)
        self.token_ids: list[int] = []
        """The tokens so far, including forced ones."""
        self.next_token_id: int | None = None
        """The sampled token whose successors are unknown."""
        self.is_ready = True
        self.is_complete = False
        self.failure: EngineError | None = None
        self.last_seconds = 0.0
        """CPU time of the latest reply; infinite after a step has waited for the next one in vain."""
        self._schema = schema
        self._budget = budget
        self._mask = b""
        self._forced: list[int] = []

    def allowed_token_ids(self) -> None:
        return None

    def token_mask(self) -> bytes:
        return self._mask or self._schema.mask

    @property
    def may_sample_again(self) -> bool:
        # A structure usually ends after the only possible token, or forces the next ones.
        return len(self.token_mask().strip(b"\0")) > 1

    def prepare(self, token_id: int) -> None:
        self.next_token_id = token_id
        self._request_state()

    def advance(self, token_id: int) -> list[int]:
        assert self.is_ready
        return self._forced

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance along an earlier run's tokens. Once ready, `failure` is set if they do not match."""
        if token_ids:
            self.token_ids = list(token_ids)
            self._request_state()

    def answer(self, answer: Answer) -> None:
        forced = answer.forced or []
        if self.next_token_id is not None:
            self.token_ids += [self.next_token_id, *forced]
        self.last_seconds = answer.seconds
        self._budget.seconds += max(0.0, answer.seconds - answer.replayed_s)
        self._budget.num_tokens += 1 + len(forced)
        self._set_ready(forced)
        self._mask = answer.mask
        self.is_complete = answer.is_complete
        if answer.error is not None:
            self.fail(InvalidRequest.with_code(*answer.error))
        elif self._budget.is_spent and not self.is_complete:
            self.refuse(
                f"its masks took {self._budget.seconds:.1f} s for {self._budget.num_tokens} tokens; "
                "make it less ambiguous, or its repetitions shorter"
            )

    def refuse(self, reason: str) -> None:
        """Mark the grammar as failed because it exceeded a limit."""
        self.fail(SchemaTooComplex(f"structured_outputs.{self._schema.kind}: {reason}"))

    def fail(self, error: EngineError) -> None:
        self._set_ready(self._forced if self.is_ready else [])
        self.is_complete = False
        self.failure = error

    def _request_state(self) -> None:
        self.is_ready = False
        self._schema.request(self)

    def _set_ready(self, forced: list[int]) -> None:
        self._forced, self.next_token_id, self.is_ready = forced, None, True
