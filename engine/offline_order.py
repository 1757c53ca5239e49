"""Order of requests that are all known beforehand: equal ones run once, shared prefixes together."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.engine.sampling_params import SamplingParams

Prepared = tuple[Sequence[int], SamplingParams]


def merge_equal(requests: Sequence[Prepared], keys: Sequence[str | None] | None = None) -> list[int]:
    """Return, per request, the index of the first one with the same output, which may be itself.

    Equal prompts with equal parameters have equal outputs if nothing is drawn, or if they specify equal
    seeds.

    Args:
        keys: identify the requests' adapters and media; None: no request has any.
    """
    seen: dict[tuple[tuple[int, ...], int | None, str | None], list[int]] = {}
    first: list[int] = []
    for number, (token_ids, params) in enumerate(requests):
        if not params.is_certain and params.seed is None:
            first.append(number)
            continue
        # Keyed by seed too: a sweep over seeds is the usual way to submit the same prompt a thousand times.
        key = None if keys is None else keys[number]
        alike = seen.setdefault((tuple(token_ids), params.seed, key), [])
        same = next((other for other in alike if requests[other][1] == params), number)
        if same == number:
            alike.append(number)
        first.append(same)
    return first


def rank_by_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return each prompt's position in an order that groups common prefixes.

    All prompts with a shared prefix then use its blocks before another prefix needs the space.
    """
    ranks = [0] * len(prompts)
    for rank, number in enumerate(sorted(range(len(prompts)), key=lambda number: tuple(prompts[number]))):
        ranks[number] = rank
    return ranks
