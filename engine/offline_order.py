"""What an engine that sees all requests of a call beforehand can spare: equal ones, and prefixes evicted too early."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.engine.sampling_params import SamplingParams

Prepared = tuple[Sequence[int], SamplingParams]


def merge_equal(requests: Sequence[Prepared]) -> list[int]:
    """For each request the number of the first one with the same output; its own number if that is itself.

    Equal prompts with equal parameters have equal outputs where nothing is drawn, or from a given seed.
    """
    seen: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    first: list[int] = []
    for number, (token_ids, params) in enumerate(requests):
        if not params.is_greedy and params.seed is None:
            first.append(number)
            continue
        # With the seed, since a sweep over seeds is the one usual way to ask the same a thousand times.
        alike = seen.setdefault((tuple(token_ids), params.seed), [])
        same = next((other for other in alike if requests[other][1] == params), number)
        if same == number:
            alike.append(number)
        first.append(same)
    return first


def rank_by_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Each prompt's place in an order in which those with a common beginning stand together.

    Blocks of a shared prefix are then used by all that have it before another prefix needs the room.
    """
    ranks = [0] * len(prompts)
    for rank, number in enumerate(sorted(range(len(prompts)), key=lambda number: tuple(prompts[number]))):
        ranks[number] = rank
    return ranks
