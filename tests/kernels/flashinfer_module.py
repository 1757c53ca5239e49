"""A replacement for FlashInfer: the interface of version 0.6.13, its checks, and plain torch."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

calls: list[str] = []
"""The methods in the order of their calls."""
plans: list[dict[str, Any]] = []


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert float_workspace_buffer.numel() == 128 * 2**20
        assert kv_layout == "HND"
        self._given: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        self._given = given = dict(locals())
        rows = len(qo_indptr) - 1
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            assert given[name].dtype is torch.int32
            assert given[name].is_contiguous()
        assert len(paged_kv_indptr) == rows + 1
        assert len(paged_kv_last_page_len) == rows
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert paged_kv_last_page_len.min() >= 1
        assert paged_kv_last_page_len.max() <= page_size
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in (torch.float16, torch.bfloat16)
        calls.append("plan")
        plans.append(given)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        given = self._given
        calls.append("run")
        assert q.dtype == out.dtype == given["q_data_type"]
        assert q.shape == out.shape == (given["qo_indptr"][-1], given["num_qo_heads"], given["head_dim_qk"])
        for pool in paged_kv_cache:
            assert pool.shape[1:] == (given["num_kv_heads"], given["page_size"], given["head_dim_qk"])
            assert pool.is_contiguous()
        queries, pages = given["qo_indptr"].tolist(), given["paged_kv_indptr"].tolist()
        for row, last in enumerate(given["paged_kv_last_page_len"].tolist()):
            tokens = slice(queries[row], queries[row + 1])
            blocks = given["paged_kv_indices"][pages[row] : pages[row + 1]].long()
            length = (len(blocks) - 1) * given["page_size"] + last
            keys, values = (
                pool[blocks].transpose(1, 2).flatten(0, 1)[:length].double() for pool in paged_kv_cache
            )
            out[tokens] = self._attend(q[tokens].double(), keys, values).to(out.dtype)
        return out

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // keys.shape[1]
        keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self._given["sm_scale"]
        if softcap := self._given["logits_soft_cap"]:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(len(query))[:, None] + len(keys) - len(query)
        distance = torch.arange(len(keys))[None, :] - position
        hidden = distance > 0
        if (left := self._given["window_left"]) >= 0:
            hidden |= distance < -left
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make it importable as `name`."""
    module: Any = ModuleType(name)
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    calls.clear()
    plans.clear()
