"""A beam search written from its definition: every continuation of every beam is ranked, without shortcuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Scores = Callable[[list[int]], list[tuple[int, float]]]
"""(output tokens so far) -> (token, log probability) for every token that may follow."""


@dataclass(frozen=True)
class BeamOutput:
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


def beam_search(
    scores: Scores,
    *,
    width: int,
    max_tokens: int,
    stop_token_ids: set[int],
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[BeamOutput]:
    """The finished beams, best first. `scores` is called once per live beam and step."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[BeamOutput] = []
    for length in range(1, max_tokens + 1):
        ranked = [
            ([*tokens, token], total + logprob) for tokens, total in live for token, logprob in scores(tokens)
        ]
        ranked.sort(key=lambda beam: -beam[1])
        live = []
        for place, (tokens, total) in enumerate(ranked):
            is_stop = tokens[-1] in stop_token_ids
            if is_stop or length == max_tokens:
                if place < width:
                    reason = "stop" if is_stop else "length"
                    finished.append(BeamOutput(tokens, total, total / length**length_penalty, reason))
            elif len(live) < width:
                live.append((tokens, total))
        finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        if not live or (len(finished) == width and early_stopping is True):
            break
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if len(finished) == width and live[0][1] / reach**length_penalty <= finished[-1].score:
            break
    return finished
