"""The kinds of numbers that matmuls multiply: scalars whose numba type represents a kind.

A kernel's first argument is a kind, which it passes down. Each kind compiles to separate machine code at
first use.
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
"""fp32: weights in any of `weight_formats`. int8 (formats of `int8_tile`) and bf16: rows are `converted`."""


def _overload(chosen: Any) -> Any:
    return overload(chosen, jit_options=PART_OPTIONS)


def choose_kernel(kind: Any, floats: Any, converted: Any) -> Any:
    """Return a function that calls the kernel for this kind, given as its numba type.

    The kernel of converted rows also receives the kind.
    """
    if kind == types.float32:

        def run(kind, *arguments):
            return floats(*arguments)

    else:

        def run(kind, *arguments):
            return converted(kind, *arguments)

    return run


def choose_converted(kind: Any, integers: Any, bfloats: Any) -> Any:
    """Return a function that calls the kernel for this kind of converted rows."""
    kernel = {types.uint8: integers, types.uint16: bfloats}[kind]

    def run(kind, *arguments):
        return kernel(*arguments)

    return run


def by_kind(floats: Any, converted: Any) -> Any:
    """Return a kernel selected by the type of its first argument; only for compiled callers.

    Selected at compile time, not by a branch, so that matmuls of other kinds than the model's are not
    compiled.
    """

    def chosen(kind, *arguments):
        raise NotImplementedError

    _overload(chosen)(lambda kind, *arguments: choose_kernel(kind, floats, converted))
    return chosen


def by_converted_kind(integers: Any, bfloats: Any) -> Any:
    """Return `by_kind` for the two kinds whose rows are converted."""

    def chosen(kind, *arguments):
        raise NotImplementedError

    _overload(chosen)(lambda kind, *arguments: choose_converted(kind, integers, bfloats))
    return chosen


def number_by_kind(integers: int, bfloats: int) -> Any:
    """Return a kernel that returns one of two constants, depending on the kind, its only argument."""

    def chosen(kind):
        raise NotImplementedError

    numbers = {types.uint8: integers, types.uint16: bfloats}

    def choose(number: int) -> Any:
        return lambda kind: number

    _overload(chosen)(lambda kind: choose(numbers[kind]))
    return chosen
