"""A replacement for the op of FlashAttention 3: the schema of vLLM 0.23's library, its checks, and plain torch."""

from __future__ import annotations

from typing import Any

import torch

from pagemill.kernels.gpu.flash_attention import NAMESPACE

# Identical to the library's, except for spaces.
SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
_NAMES = tuple(argument.split()[-1] for argument in SCHEMA[4 : SCHEMA.index(")")].split(","))
_UNUSED = {
    "k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos",
    "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "cp_tot_seqused_k", "scheduler_metadata",
}  # fmt: skip

calls: list[dict[str, Any]] = []
"""The arguments of each call."""
_library: list[torch.library.Library] = []


def register() -> None:
    """Define the op for CPU tensors, once per process."""
    if not _library:
        library = torch.library.Library(NAMESPACE, "DEF")
        library.define(SCHEMA)
        library.impl("fwd", _fwd, "CPU")
        _library.append(library)


def _fwd(*values: Any) -> list[torch.Tensor]:
    given = dict(zip(_NAMES, values, strict=True))
    calls.append(given)
    _check(given)
    query, table = given["q"], given["page_table"]
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    starts, lengths = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        pages = table[row, : -(-length // given["k"].shape[1])].long()
        keys, values_ = (given[name][pages].flatten(0, 1)[:length].double() for name in "kv")
        if length == 0:
            out[tokens] = 0.0
        else:
            out[tokens] = _attend(query[tokens].double(), keys, values_, given).to(query.dtype)
    return [out, torch.empty(query.shape[1], len(query))]


def _check(given: dict[str, Any]) -> None:
    query, keys, values, table = (given[name] for name in ("q", "k", "v", "page_table"))
    rows = len(given["seqused_k"])
    assert all(given[name] is None for name in _UNUSED)
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == keys.dtype == values.dtype
    assert all(tensor.stride(-1) == 1 for tensor in (query, keys, values, table))
    assert all(given[name].dtype is torch.int32 for name in ("cu_seqlens_q", "seqused_k", "page_table"))
    assert given["cu_seqlens_q"].shape == (rows + 1,)
    assert len(table) == rows
    assert keys.shape[2:] == values.shape[2:] == (keys.shape[2], query.shape[2])
    assert query.shape[1] % keys.shape[2] == 0
    assert query.shape[2] <= 256
    assert query.shape[2] % 8 == 0
    lengths = given["cu_seqlens_q"].diff()
    assert given["max_seqlen_q"] >= lengths.max()
    assert given["max_seqlen_k"] >= given["seqused_k"].max()
    assert 0 <= given["num_splits"] <= 256
    assert (given["cp_world_size"], given["cp_rank"], given["sm_margin"]) == (1, 0, 0)
    if (sinks := given["s_aux"]) is not None:
        assert sinks.dtype is torch.bfloat16
        assert sinks.shape == (query.shape[1],)
        assert len(sinks) <= 64


def _attend(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_keys, num_kv_heads, head_dim]
    values: torch.Tensor,
    given: dict[str, Any],
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * given["softmax_scale"]
    if softcap := given["softcap"]:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(query))[:, None] + len(keys) - len(query)
    distance = torch.arange(len(keys))[None, :] - position
    left, right = given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]
    hidden = (distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := given["s_aux"]) is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)
