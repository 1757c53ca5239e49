"""Compares each kernel that a model uses with the plain torch reference, on the model's arguments.

A kernel can be wrong for only one GPU, driver or compiler, and its results then look normal. A process
therefore compares before it serves: `KernelCheck` observes calls of `pagemill.kernels.dispatch`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagemill.kernels.types.layer_cache import FP8

_RELATIVE = {
    torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.int8: 6e-2, FP8: 6e-2,
}  # fmt: skip
"""Largest ||out - reference|| / ||reference||: several times the rounding error, a fraction of a fault's error."""
_DIFFERENT = 0.25
"""Largest share of integers, such as tokens, that differ: rounding can decide between two nearly equal candidates."""
_MODULES = ("pagemill.kernels.",)


class KernelCheck:
    """An observer for `pagemill.kernels.dispatch.observed`: calls a kernel and its reference on the same arguments."""

    def __init__(self) -> None:
        self.wrong: dict[str, str] = {}
        """Kernels that differ or raise: operator to reason."""
        self.uncompared: dict[str, str] = {}
        """Operators whose reference itself raises, such as for lack of memory: operator to reason."""
        self.num_compared = 0
        self._seen: set[Any] = set()

    def __call__(
        self, name: str, kernel: Callable[..., Any], reference: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return the kernel's result, or the reference's if the kernel is wrong; arguments are updated accordingly."""
        case = (name, *(_kind(leaf) for leaf in _leaves([args, kwargs])))
        if case in self._seen:  # the layers of a model are alike
            return (reference if name in self.wrong else kernel)(*args, **kwargs)
        self._seen.add(case)
        try:
            memo: dict[int, Any] = {}
            copied_args, copied_kwargs = _copied(args, memo), _copied(kwargs, memo)
            # Present tensors only: a call may also store derived data, such as a list of its work.
            given, copies = _tensors([args, kwargs]), _tensors([copied_args, copied_kwargs])
            untouched = [tensor.clone() for tensor in given]
            expected = reference(*copied_args, **copied_kwargs)
        except Exception as error:  # not a fault of the kernel
            self.uncompared.setdefault(name, _first_line(error))
            return kernel(*args, **kwargs)
        try:
            result = kernel(*args, **kwargs)
            reason = _difference([*_tensors(result), *given], [*_tensors(expected), *copies])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of the compiler or the launch: the reference can still be used
            reason = _first_line(error)
        self.num_compared += 1
        if reason is None:
            return result
        self.wrong.setdefault(name, reason)
        for target, source in zip(given, untouched, strict=True):
            target.copy_(source)
        return reference(*args, **kwargs)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and plain values in lists, tuples, dicts, and objects of the kernels' types."""
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith(_MODULES):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape)
    return leaf if isinstance(leaf, int | float | str | torch.dtype | None) else type(leaf)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy with separate tensors; shared tensors are also shared in the copy."""
    if id(value) in memo:
        return memo[id(value)]
    result = value
    if isinstance(value, torch.Tensor):
        result = value.clone()
    elif isinstance(value, list | tuple):
        copies = [_copied(each, memo) for each in value]
        # A named tuple is constructed from separate fields.
        is_named = isinstance(value, tuple) and type(value) is not tuple
        result = type(value)(*copies) if is_named else type(value)(copies)
    elif isinstance(value, dict):
        result = {key: _copied(each, memo) for key, each in value.items()}
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith(_MODULES):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, _copied(getattr(value, field.name), memo))
    memo[id(value)] = result
    return result


def _difference(result: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    """Describe a difference of tensors beyond rounding; None if they agree."""
    if len(result) != len(expected):
        return f"{len(result)} tensors instead of {len(expected)}"
    reasons = (_tensor_difference(one, other) for one, other in zip(result, expected, strict=True))
    return next(filter(None, reasons), None)


def _tensor_difference(out: torch.Tensor, expected: torch.Tensor) -> str | None:
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return f"{out.dtype} {list(out.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if not out.numel():
        return None
    if out.dtype not in _RELATIVE:
        share = (out != expected).double().mean().item()
        return f"{share:.0%} of {out.dtype} differ" if share > _DIFFERENT else None
    wide, truth = out.double(), expected.double()
    counts = truth.isfinite()  # unwritten memory may contain any values
    if not wide[counts].isfinite().all():
        return "values that are not finite"
    norm = truth[counts].norm().item()
    error = (wide[counts] - truth[counts]).norm().item()
    limit = _RELATIVE[out.dtype] * norm
    return f"a relative error of {error / (norm or 1.0):.2g} in {out.dtype}" if error > limit else None
