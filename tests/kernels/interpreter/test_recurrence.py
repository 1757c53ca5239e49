"""The recurrences, run by Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch, recurrence
from tests.kernels.recurrence_case import NAMES, SHAPES, operator_of, recurrence_case


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_torch(name: str, shape: tuple[int, ...], is_new: bool) -> None:
    states, given, slots = recurrence_case(name, shape)
    found, wanted = states.clone(), states.clone()
    with dispatch.override("triton"):
        out = operator_of(dispatch, name)(found, *given, slots, is_new=is_new)
    expected = operator_of(recurrence, name)(wanted, *given, slots, is_new=is_new)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
