"""The recurrences on CPUs compared with plain torch, for any division of the tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from pagemill.kernels import recurrence as reference
from pagemill.kernels.cpu import recurrence
from tests.kernels.recurrence_case import NAMES, NUM_SLOTS, SHAPES, operator_of, recurrence_case


def run(
    module: Any, name: str, states: torch.Tensor, given: list[torch.Tensor], **options: Any
) -> torch.Tensor:
    slots = options.pop("slots")
    out: torch.Tensor = operator_of(module, name)(states, *given, slots, **options)
    return out


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_torch(name: str, shape: tuple[int, ...], is_new: bool) -> None:
    states, given, slots = recurrence_case(name, shape)
    found, wanted = states.clone(), states.clone()
    out = run(recurrence, name, found, given, slots=slots, is_new=is_new)
    expected = run(reference, name, wanted, given, slots=slots, is_new=is_new)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots.tolist()]
    assert torch.equal(found[others], states[others])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_have_the_same_bits(name: str, shape: tuple[int, ...]) -> None:
    states, given, slots = recurrence_case(name, shape)
    length = shape[1]
    whole, parts = states.clone(), states.clone()
    expected = run(recurrence, name, whole, given, slots=slots, is_new=True)
    outputs = []
    for begin, end in pairwise(sorted({0, 1, length // 2, length})):
        chunk = [each[:, begin:end] if each.ndim > 2 else each for each in given]
        outputs.append(run(recurrence, name, parts, chunk, slots=slots, is_new=begin == 0))
    assert torch.equal(torch.cat(outputs, dim=1), expected)
    assert torch.equal(parts, whole)
