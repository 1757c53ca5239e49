"""The choice of experts, run by Triton's interpreter, compared with plain torch."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch, experts
from pagemill.kernels.experts import Routing

ROUTINGS = [
    Routing(top_k=1),
    Routing(top_k=2),
    Routing(top_k=3, normalizes=True),
    Routing(top_k=8, scores="sigmoid", normalizes=True, epsilon=1e-20, scale=2.5),
    Routing(top_k=2, scores="sigmoid", num_groups=4, kept_groups=2, group_best=2),
]


def check(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> None:
    """Compare with the reference; the same experts, in the same order."""
    with dispatch.override("triton"):
        found_weights, found = dispatch.route(logits, bias, routing)
    weights, indices = experts.route(logits, bias, routing)
    assert torch.equal(found, indices)
    torch.testing.assert_close(found_weights, weights, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_experts", [8, 20, 128])
def test_choice(routing: Routing, has_bias: bool, num_experts: int) -> None:
    logits = 4 * torch.randn(6, 2 * num_experts)[:, :num_experts]
    check(logits, torch.randn(num_experts) if has_bias else None, routing)
    check(logits[:0], None, routing)
    check(logits.half(), None, routing)


@pytest.mark.parametrize("routing", ROUTINGS[:4])
def test_the_lowest_of_equal_experts_is_first(routing: Routing) -> None:
    logits = torch.randint(-1, 2, (30, 12)).float()
    logits[0], logits[1, 3:], logits[2, :9] = 0.0, -200.0, float("-inf")
    check(logits, None, routing)
    check(logits, torch.zeros(12), routing)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("routing", ROUTINGS[:4])
def test_numbers_that_are_not_finite(routing: Routing, broken: float) -> None:
    logits = torch.full((3, 12), broken)
    logits[1, 3:] = 0.5
    check(logits, None, routing)
    check(logits, torch.linspace(-1, 1, 12), routing)
