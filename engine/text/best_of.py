"""Competing samples: all are held back until the last has ended, and only the best are returned."""

from __future__ import annotations

from pagemill.engine.outputs import CompletionDelta


class BestOf:
    """One request's samples.

    Args:
        num_returned: number of samples that the caller receives.
        with_logprobs: whether the caller requested logprobs; the samples always have them, for the ranking.
    """

    def __init__(self, num_returned: int, *, with_logprobs: bool) -> None:
        self._num_returned = num_returned
        self._with_logprobs = with_logprobs
        self._samples: dict[int, CompletionDelta] = {}

    def hold(self, delta: CompletionDelta) -> None:
        """Append a sample's delta."""
        entries = delta.logprobs or []
        gained = sum(entry.logprob for entry in entries if entry.logprob is not None)
        delta.cumulative_logprob = gained
        held = self._samples.setdefault(delta.index, delta)
        if held is not delta:
            held.token_ids = held.token_ids + delta.token_ids
            held.text += delta.text
            held.logprobs = (held.logprobs or []) + entries
            held.cumulative_logprob = (held.cumulative_logprob or 0.0) + gained
            held.finish_reason, held.stop_reason = delta.finish_reason, delta.stop_reason

    def release(self) -> list[CompletionDelta]:
        """Return the best samples complete, ranked by cumulative logprob, ties in the order drawn."""
        ranked = sorted(
            self._samples.values(), key=lambda held: (-(held.cumulative_logprob or 0.0), held.index)
        )
        returned = ranked[: self._num_returned]
        for rank, sample in enumerate(returned):
            sample.index, sample.offset = rank, 0
            if not self._with_logprobs:
                sample.logprobs = None
        return returned
