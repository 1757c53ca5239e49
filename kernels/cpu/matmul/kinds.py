"""The kinds of numbers that products multiply: scalars whose numba type represents one.

A kernel takes a kind first and passes it down: so each kind compiles to its own machine code, when it is first used.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numba import types
from numba.extending import overload

from pagemill.kernels.cpu.jit.kernel import PART_OPTIONS

FLOATS, INTEGERS, BFLOATS = np.float32(0), np.uint8(0), np.uint16(0)
KindName = Literal["fp32", "int8", "bf16"]
KINDS: dict[KindName, Any] = {"fp32": FLOATS, "int8": INTEGERS, "bf16": BFLOATS}
"""fp32: weights in any of `weight_formats`; int8, in any of `int8_tile`, and bf16: rows that are `converted`."""


def _overload(chosen: Any) -> Any:
    return overload(chosen, jit_options=PART_OPTIONS)


def choose_kernel(kind: Any, floats: Any, converted: Any) -> Any:
    """Return a caller of the one of two kernels that is made for this kind, given by its numba type.

    That of converted rows takes the kind itself.
    """
    if kind == types.float32:

        def run(kind, *arguments):
            return floats(*arguments)

    else:

        def run(kind, *arguments):
            return converted(kind, *arguments)

    return run


def choose_converted(kind: Any, integers: Any, bfloats: Any) -> Any:
    """Return a caller of one of two kernels whose rows are converted."""
    kernel = {types.uint8: integers, types.uint16: bfloats}[kind]

    def run(kind, *arguments):
        return kernel(*arguments)

    return run


def by_kind(floats: Any, converted: Any) -> Any:
    """A kernel selected by the type of its first argument; for compiled callers alone.

    Chosen while compiling, not by a branch: no product is compiled of a kind that the model does not have.
    """

    def chosen(kind, *arguments):
        raise NotImplementedError

    _overload(chosen)(lambda kind, *arguments: choose_kernel(kind, floats, converted))
    return chosen


def by_converted_kind(integers: Any, bfloats: Any) -> Any:
    """The same for the two kinds whose rows are converted."""

    def chosen(kind, *arguments):
        raise NotImplementedError

    _overload(chosen)(lambda kind, *arguments: choose_converted(kind, integers, bfloats))
    return chosen


def number_by_kind(integers: int, bfloats: int) -> Any:
    """A constant of each of these, as a kernel of a kind alone."""

    def chosen(kind):
        raise NotImplementedError

    numbers = {types.uint8: integers, types.uint16: bfloats}

    def choose(number: int) -> Any:
        return lambda kind: number

    _overload(chosen)(lambda kind: choose(numbers[kind]))
    return chosen
