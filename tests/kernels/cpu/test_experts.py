"""MoE models on a CPU: the kernels compared with plain torch, and bits that do not depend on neighbors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagemill.kernels import dispatch
from pagemill.kernels.cpu.experts.grouped import GroupedWeights, multiply, padded_bias
from pagemill.kernels.cpu.matmul import bf16, int8
from pagemill.kernels.cpu.matmul.kinds import KindName
from pagemill.kernels.cpu.matmul.weight_packing import pack_each
from pagemill.kernels.experts import Routing
from pagemill.kernels.grouped_int8 import multiply as multiply_int8
from pagemill.kernels.grouped_int8 import quantize

ROUTINGS = [
    Routing(top_k=2),
    Routing(top_k=3, normalizes=True),
    Routing(top_k=2, scores="sigmoid", normalizes=True, epsilon=1e-20, scale=2.5),
    Routing(top_k=2, scores="sigmoid", num_groups=4, kept_groups=2, group_best=2),
    Routing(top_k=2, scale=1.5, num_groups=4, kept_groups=1),
]  # fmt: skip
KINDS: list[KindName] = ["fp32", "int8", *(["bf16"] if bf16.is_native() else [])]


@pytest.fixture(autouse=True, params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every test with one thread and with two: with about a thousand values per thread, other kernels run."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routing(routing: Routing, has_bias: bool) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(1500, 16) * 2, torch.randn(16) if has_bias else None
    with dispatch.override("reference"):
        weights, indices = dispatch.route(logits, bias, routing)
    found_weights, found = dispatch.route(logits, bias, routing)
    assert torch.equal(found, indices)
    torch.testing.assert_close(found_weights, weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("routing", ROUTINGS[:3])
def test_the_lowest_of_equal_experts_is_first(routing: Routing) -> None:
    logits = torch.randint(-1, 2, (300, 16)).float()
    with dispatch.override("reference"):
        _, indices = dispatch.route(logits, None, routing)
    assert torch.equal(dispatch.route(logits, None, routing)[1], indices)
    assert torch.equal(dispatch.route(torch.zeros(1, 16), None, routing)[1][0], torch.arange(routing.top_k))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_numbers_that_are_not_finite_choose_distinct_experts(routing: Routing, broken: float) -> None:
    logits = torch.full((3, 16), broken)
    logits[1, 3:] = 0.5
    _, indices = dispatch.route(logits, None, routing)
    assert all(len(set(row)) == routing.top_k and 0 <= min(row) <= max(row) < 16 for row in indices.tolist())


@pytest.mark.parametrize("size", [3, 16, 90])
def test_clamped_swiglu(size: int) -> None:
    """Gates and ups beyond the limit, some of them far; a row alone returns the same bits."""
    torch.manual_seed(0)
    x = torch.randn(2000, 2 * size) * 5
    x[7], x[8] = 1e4, -1e4
    with dispatch.override("reference"):
        expected = dispatch.clamped_swiglu(x, 1.702, 7.0)
    found = dispatch.clamped_swiglu(x, 1.702, 7.0)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(found[77:78], dispatch.clamped_swiglu(x[77:78], 1.702, 7.0))


def test_rows_are_sorted_by_expert_and_combined() -> None:
    torch.manual_seed(0)
    x, indices = torch.randn(900, 37), torch.stack([torch.randperm(6)[:3] for _ in range(900)])
    weights = torch.rand(900, 3)
    found = dispatch.sort_by_expert(x, indices, 8)
    with dispatch.override("reference"):
        expected = dispatch.sort_by_expert(x, indices, 8)
        total = dispatch.combine_experts(expected[0], expected[1], weights)
    assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(dispatch.combine_experts(found[0], found[1], weights), total)
    torch.testing.assert_close(total, x * weights.sum(dim=1, keepdim=True))


def packed(weights: torch.Tensor, bias: torch.Tensor | None, kind: KindName) -> GroupedWeights:
    count, shape = len(weights), (weights.shape[1], weights.shape[2])
    biases = padded_bias(bias, shape[0])
    if kind == "fp32":
        return GroupedWeights.of_floats(pack_each(weights.__getitem__, count, shape), biases, count)
    all_packed = {"int8": int8, "bf16": bf16}[kind].pack_each(weights.__getitem__, count)
    return GroupedWeights(kind, all_packed.panels, all_packed.weight_format, biases, count, *shape)


def expected_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: KindName
) -> torch.Tensor:
    if kind == "int8":
        return multiply_int8(x, *quantize(weight), bias)
    if kind == "bf16":
        x, weight = x.bfloat16().float(), weight.bfloat16().float()
    return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (40, 50), (64, 800)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_grouped_products(kind: KindName, out_features: int, in_features: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weights = torch.randn(5, out_features, in_features)
    bias = torch.randn(5, out_features) if has_bias else None
    offsets = torch.tensor([0, 3, 3, 40, 41, 200])
    x = torch.randn(200, in_features)
    out = multiply(x, offsets, packed(weights, bias, kind))
    for expert in range(5):
        rows = x[offsets[expert] : offsets[expert + 1]]
        if len(rows):
            wanted = expected_product(rows, weights[expert], None if bias is None else bias[expert], kind)
            torch.testing.assert_close(
                out[offsets[expert] : offsets[expert + 1]], wanted, rtol=1e-4, atol=1e-3
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_its_neighbours_are(kind: KindName) -> None:
    torch.manual_seed(0)
    weights = packed(torch.randn(4, 64, 96), None, kind)
    x = torch.randn(300, 96)
    together = multiply(x, torch.tensor([0, 0, 150, 160, 300]), weights)
    for row, expert in ((0, 1), (149, 1), (155, 2), (160, 3), (299, 3)):
        offsets = torch.tensor([0] * (expert + 1) + [1] * (4 - expert))
        assert torch.equal(multiply(x[row : row + 1], offsets, weights)[0], together[row])


def test_lossless_formats_of_all_experts() -> None:
    weights = torch.randn(3, 40, 64).bfloat16().float()
    weight = pack_each(weights.__getitem__, 3, (40, 64))
    assert weight.panels.shape[0] == 3 * 2
    assert weight.panels.nbytes == 3 * 2 * 32 * 64 * 2
