"""Decides how many tokens to draft for each row of a step, by their measured benefit.

A draft is computed as a separate row of one token that shares its sequence's block table: the values are
bit-identical to those of a decode, and sampling depends only on the position. So drafts do not change any output,
only the number of steps.
"""

from __future__ import annotations

from pagemill.engine.plan import StepPlan, StepResult, TokenLogprobs
from pagemill.engine.scheduling.request import Sequence
from pagemill.engine.scheduling.speculation.prompt_lookup import Acceptance, PromptLookup
from pagemill.engine.scheduling.speculation.step_cost import StepCost

MARGIN = 1.1
"""Factor by which the expected benefit of drafts must exceed their time: estimates are noisy."""


class Drafter:
    """Drafts for the rows of successive steps, up to `max_drafts` per row and step; 0 disables them.

    A step of T tokens that yields E output tokens takes seconds(T). A draft that will be accepted with
    probability p pays if the step's output per second grows: p / E > slope / seconds(T). A single row
    therefore drafts far ahead. A full batch, whose time grows with every token, drafts only nearly certain
    tokens.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.num_drafted = 0
        self.num_accepted = 0
        self._acceptance = Acceptance()
        self._cost = StepCost()
        self._slope = 0.0
        self._num_tokens = 0
        self._num_expected = 0.0

    def begin_step(self, num_rows: int) -> None:
        """Start drafting for a step with this many rows."""
        self._slope = self._cost.slope * MARGIN
        self._num_tokens, self._num_expected = num_rows, float(num_rows)

    def draft(self, sequence: Sequence, room: int) -> list[int]:
        """Return the drafts that pay, up to `room`, for a sequence whose tokens are all known."""
        lookup = sequence.lookup
        if lookup is None:
            lookup = sequence.lookup = PromptLookup(self._acceptance)
        if len(lookup) < sequence.num_known_tokens:
            lookup.extend(sequence.known_tokens(len(lookup), sequence.num_known_tokens))
        if not lookup.num_matched:
            return []
        return lookup.predict(self._num_paying(lookup.num_matched, min(room, self.max_drafts)))

    def retire(self, plan: StepPlan, result: StepResult) -> None:
        """Update the estimate with a step's time."""
        if self.max_drafts and plan.kind == "decode":
            self._cost.observe(plan.num_tokens, result.prepare_s + result.forward_s + result.sample_s)

    def _num_paying(self, num_matched: int, limit: int) -> int:
        probability, count = 1.0, 0
        while count < limit:
            probability *= self._acceptance.expected(num_matched + count)
            time = self._cost.seconds(self._num_tokens)
            if probability * time < self._slope * self._num_expected:
                break
            count += 1
            self._num_tokens += 1
            self._num_expected += probability
        return count


def accepted(
    result: StepResult, number: int, drafts: list[int]
) -> tuple[list[int], list[TokenLogprobs] | None]:
    """Return a row's sampled tokens and log-probabilities, up to the first mismatch with its drafts.

    `number` is the sample after the row's newest token; those after its drafts follow it.
    """
    token_ids, logprobs = list(result.token_ids[number]), result.logprobs.get(number)
    for later, draft in enumerate(drafts, number + 1):
        if token_ids[-1] != draft or later in result.invalid or later in result.without_choice:
            break
        token_ids += result.token_ids[later]
        if logprobs is not None:
            logprobs = logprobs + result.logprobs[later]
    return token_ids, logprobs
