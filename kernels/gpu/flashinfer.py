"""FlashInfer as a backend of paged attention: its kernel for prompts, on Pagemill's unchanged cache.

Source: Ye et al. 2025, "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving".
It plans each step on the host, so its calls cannot be captured in a graph: Pagemill's kernel computes decode
rows. Keys before a window that share a tile with it are multiplied by zero: caches must be finite there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring
from pagemill.kernels.types.transfer import to_device

MODULE = "flashinfer"
_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
"""The size that its documentation recommends."""
_NUM_PLANNERS = 2
"""Number of steps in flight: a step is planned without waiting for the one before it."""
_PLANNED = frozenset({
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
    "head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type",
})  # fmt: skip


@dataclass(slots=True)
class _Planner:
    """The library's object for the layers of one kind, which share a step's plan."""

    wrapper: Any
    step: AttentionMetadata | None = None
    """The step that it has planned."""
    copied: Any = None
    """Event: the plan is on the device, and its pinned memory can be overwritten."""

    def plan(self, metadata: AttentionMetadata, options: dict[str, Any]) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        self.wrapper.plan(**_pages(metadata, options["page_size"]), **options)
        self.step = metadata
        if metadata.block_tables.is_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record()


class FlashInfer:
    """A `pagemill.kernels.gpu.attention_backend.PagedAttentionBackend`. The library loads on first use."""

    def __init__(self) -> None:
        self._planners: dict[tuple[Any, ...], list[_Planner]] = {}
        """By kind of layer; the newest plan is first."""
        self._workspaces: dict[torch.device, torch.Tensor] = {}

    def require(self, device: torch.device) -> None:
        """Load the library. Raises `Unavailable`."""
        _ = self._wrapper

    def unsupported(self, query: torch.Tensor, cache: LayerCache, scoring: Scoring) -> str | None:
        """Return the reason why the library cannot compute a layer; None if it can."""
        head_dim = query.shape[2]
        if query.dtype not in _DTYPES or cache.keys.dtype != query.dtype or cache.values.dtype != query.dtype:
            return f"queries of {query.dtype} over a cache of {cache.keys.dtype}"
        if head_dim not in _HEAD_DIMS:
            return f"a head_dim of {head_dim}"
        if scoring.alibi_slopes is not None:
            return "ALiBi"
        if (scoring.sliding_window or 0) < 0:
            return "chunked attention"
        return None if scoring.sinks is None else "sinks"

    def attend(
        self, query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
    ) -> torch.Tensor:
        """See `pagemill.kernels.dispatch.paged_attention`. Raises `Unavailable` if the library can't be loaded."""
        out = query.new_empty(query.shape)
        first = metadata.num_decode_rows
        if first:
            paged_attention_decode(
                out[:first],
                query[:first],
                cache,
                metadata.block_tables[:first],
                metadata.seq_lens[:first],
                scoring,
                max_seq_len=metadata.max_seq_len,
            )
        if num_tokens := sum(_prompts(metadata)[0]):
            tokens = slice(first, first + num_tokens)
            wrapper = self._planned(query, cache, metadata, scoring)
            wrapper.run(query[tokens], (cache.keys, cache.values), out=out[tokens])
        return out

    def _planned(
        self, query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
    ) -> Any:
        """Return a wrapper that has planned the step's prompts for this kind of layer."""
        num_heads, head_dim = query.shape[1:]
        window = scoring.sliding_window
        options = {
            "num_qo_heads": num_heads,
            "num_kv_heads": cache.num_kv_heads,
            "head_dim_qk": head_dim,
            "page_size": cache.block_size,
            "causal": True,
            "sm_scale": scoring.scale,
            "window_left": window - 1 if window else -1,  # keys before the query's position
            "logits_soft_cap": scoring.softcap or 0.0,
            "q_data_type": query.dtype,
        }
        key = (query.device, cache.group, *options.values())
        planners = self._planners.get(key)
        if planners is None:
            workspace = self._workspace(query.device)
            planners = [_Planner(self._wrapper(workspace, "HND")) for _ in range(_NUM_PLANNERS)]
            self._planners[key] = planners
        if planners[0].step is not metadata:
            planners.insert(0, planners.pop())
            planners[0].plan(metadata, options)
        return planners[0].wrapper

    def _workspace(self, device: torch.device) -> torch.Tensor:
        """Return the scratch memory of all layers, which run one after the other."""
        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[device]

    @cached_property
    def _wrapper(self) -> Any:
        """The library's class. Raises `Unavailable`."""
        if find_spec(MODULE) is None:
            raise Unavailable("FlashInfer is not installed; pip install flashinfer-python==0.6.13")
        try:
            wrapper = importlib.import_module(MODULE).BatchPrefillWithPagedKVCacheWrapper
        except Exception as error:  # it imports compilers and checks the GPU
            raise Unavailable(f"FlashInfer cannot be loaded: {type(error).__name__}: {error}") from error
        if missing := _PLANNED - inspect.signature(wrapper.plan).parameters.keys():
            names = ", ".join(sorted(missing))
            raise Unavailable(f"FlashInfer of an unsupported version lacks {names}; install 0.6.13")
        return wrapper


def _prompts(metadata: AttentionMetadata) -> tuple[list[int], list[int]]:
    """Return the lengths of queries and of keys of the rows that are neither decode rows nor padding."""
    first = metadata.num_decode_rows
    lens = zip(metadata.query_lens_host[first:], metadata.seq_lens_host[first:], strict=True)
    rows = [(query_len, seq_len) for query_len, seq_len in lens if seq_len]
    return [query_len for query_len, _ in rows], [seq_len for _, seq_len in rows]


def _pages(metadata: AttentionMetadata, page_size: int) -> dict[str, torch.Tensor]:
    """Return the plan's arguments about rows and their blocks; int32."""
    query_lens, seq_lens = _prompts(metadata)
    counts = [-(-seq_len // page_size) for seq_len in seq_lens]
    tables = metadata.block_tables[metadata.num_decode_rows :]
    width = tables.shape[1]
    places = np.concatenate([row * width + np.arange(count) for row, count in enumerate(counts)])
    return {
        "qo_indptr": _on_host([0, *accumulate(query_lens)], tables.device),
        "paged_kv_indptr": _on_host([0, *accumulate(counts)], tables.device),
        "paged_kv_indices": tables.reshape(-1)[to_device(places, tables.device)],
        "paged_kv_last_page_len": _on_host(
            [(seq_len - 1) % page_size + 1 for seq_len in seq_lens], tables.device
        ),
    }


def _on_host(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return values that the library reads on the host and copies to the device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int32)
    return host.pin_memory() if device.type == "cuda" else host
