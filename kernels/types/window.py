"""The keys that a layer with a window reads. Plain Python, which numba also compiles."""

from __future__ import annotations

from typing import Any


def first_visible(window: int, position: Any) -> Any:
    """Return the first key that the query at a position reads. It can be below 0, and never decreases with positions.

    Args:
        window: above 0: a query reads this number of keys, including its own. Below 0: keys are in chunks of `-window`
            tokens, and a query reads those of its chunk. 0: every key.
        position: at least 0; an integer, or a tensor of integers.
    """
    return position + 1 - window if window > 0 else position // -window * -window if window < 0 else 0
