"""Attention within texts: one call for all of them on a GPU, one per length on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagemill.engine.layers.packed_attention import PackedScoring, PackedTexts, attend_packed, packed_texts

LENGTHS = [1, 2, 5, 5, 9, 30]
_NUM_TOKENS = sum(LENGTHS)


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """FlashAttention on the CPU, by its definition; the number of texts of each call."""
    seen: list[int] = []

    def flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        wants_mask: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
        **unused: Any,
    ) -> tuple[torch.Tensor, ...]:
        assert (dropout, wants_mask) == (0.0, False)
        assert starts_q.dtype is torch.int32
        assert torch.equal(starts_q, starts_k)
        assert not any(unused.values())
        seen.append(len(starts_q) - 1)
        out = torch.empty_like(query)
        groups = query.shape[1] // key.shape[1]
        for begin, end in zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True):
            assert end - begin <= max_q == max_k
            q, k, v = (x[begin:end].transpose(0, 1).float() for x in (query, key, value))
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            away = torch.arange(end - begin)[None] - torch.arange(end - begin)[:, None]
            is_seen = torch.ones_like(away, dtype=torch.bool)
            if window_size_left >= 0:
                is_seen &= away >= -window_size_left
            if is_causal or window_size_right >= 0:
                is_seen &= away <= (0 if is_causal else window_size_right)
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(~is_seen, float("-inf"))
            out[begin:end] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        empty = torch.empty(0)
        return out, empty, empty.to(torch.uint64), empty.to(torch.uint64), empty

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash, "CPU")
        yield seen


def _attend(scoring: PackedScoring, texts: PackedTexts, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(_NUM_TOKENS, heads, head_dim, generator=generator).to(dtype) for heads in (4, 2, 2)
    )
    with packed_texts(texts):
        return attend_packed(query, key, value, scoring).float()


def _on_gpu() -> PackedTexts:
    """Texts as on a GPU, whose tensors are on the CPU."""
    groups = PackedTexts.from_lengths(LENGTHS, torch.device("cpu")).groups
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return PackedTexts(groups, starts)


@pytest.mark.parametrize(
    "scoring",
    [
        PackedScoring(0.3),
        PackedScoring(0.2, is_causal=True),
        PackedScoring(0.3, window=4),
        PackedScoring(0.3, is_causal=True, window=4),
        PackedScoring(0.3, window=1),
    ],
)
def test_one_call_computes_all_texts(scoring: PackedScoring, calls: list[int]) -> None:
    by_length = _attend(scoring, PackedTexts.from_lengths(LENGTHS, torch.device("cpu")), torch.bfloat16, 16)
    assert calls == []
    at_once = _attend(scoring, _on_gpu(), torch.bfloat16, 16)
    assert calls == [len(LENGTHS)]
    assert (at_once - by_length).abs().max() < 0.03


@pytest.mark.parametrize(
    ("dtype", "head_dim", "bias"),
    [
        (torch.float32, 16, False),
        (torch.bfloat16, 12, False),
        (torch.bfloat16, 264, False),
        (torch.bfloat16, 16, True),
    ],
)
def test_other_layers_take_a_call_per_length(
    dtype: torch.dtype, head_dim: int, bias: bool, calls: list[int]
) -> None:
    def zeros(length: int) -> torch.Tensor:
        return torch.zeros(4, length, length)

    scoring = PackedScoring(0.1, bias=zeros if bias else None)
    assert _attend(scoring, _on_gpu(), dtype, head_dim).isfinite().all()
    assert calls == []


def test_only_a_gpu_needs_the_starts() -> None:
    assert PackedTexts.from_lengths(LENGTHS, torch.device("cpu")).starts is None
