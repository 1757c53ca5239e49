"""FlashAttention 3 as a backend of paged attention: the op of vLLM's wheels, on Pagemill's unchanged cache.

Source: Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision".
One call computes decode rows and prompts together. The op reads its schedule from the lengths on the device,
so a call can be captured in a graph.

For keys that a query does not see, the op multiplies by zero; Pagemill's kernels do not read them. These are
up to one tile of keys before a window, whose block ids must be valid, and unused slots if a block is a
multiple of the tile. Caches must be finite there.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

NAMESPACE = "_vllm_fa3_C"
_FILE = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
_CAPABILITY = 9
"""The major number: the library is compiled only for sm_90a."""
_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8
_MAX_HEADS_WITH_SINKS = 64
_MAX_BLOCK_SIZE = 64
"""In blocks of complete tiles, the op multiplies stale data of a block by zero, and that data can be NaN."""
_DECODE_SPLITS = 32
"""Maximum number of parts of a decode row's keys.

It sizes the workspace, and is the same in all replays of a graph. The op chooses each row's count on the
device.
"""
_FIXED: dict[str, Any] = {"is_rotary_interleaved": False, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
"""Required arguments that Pagemill does not use."""
_GIVEN = frozenset({
    "q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale",
    "is_causal", "window_size_left", "window_size_right", "softcap", "num_splits", "s_aux",
})  # fmt: skip


class FlashAttention3:
    """A `pagemill.kernels.gpu.attention_backend.PagedAttentionBackend`. The library loads on first use."""

    def require(self, device: torch.device) -> None:
        """Load the library. Raises `Unavailable`."""
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if major != _CAPABILITY:
                raise Unavailable(
                    f"FlashAttention 3 requires a GPU of compute capability {_CAPABILITY}.x, such as an H100; "
                    f"this one has {major}.{minor}"
                )
        _ = self._unused

    def unsupported(self, query: torch.Tensor, cache: LayerCache, scoring: Scoring) -> str | None:
        """Return the reason why the op cannot compute a layer; None if it can."""
        num_heads, head_dim = query.shape[1:]
        if query.dtype not in _DTYPES or cache.keys.dtype != query.dtype or cache.values.dtype != query.dtype:
            return f"queries of {query.dtype} over a cache of {cache.keys.dtype}"
        if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_STEP:
            return f"a head_dim of {head_dim}"
        if cache.block_size > _MAX_BLOCK_SIZE:
            return f"a block_size of {cache.block_size}"
        if scoring.alibi_slopes is not None:
            return "ALiBi"
        if (scoring.sliding_window or 0) < 0:
            return "chunked attention"
        if scoring.sinks is not None and num_heads > _MAX_HEADS_WITH_SINKS:
            return f"sinks of {num_heads} heads"
        return None

    def attend(
        self, query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
    ) -> torch.Tensor:
        """See `pagemill.kernels.dispatch.paged_attention`. Raises `Unavailable` if the library can't be loaded."""
        window = scoring.sliding_window
        results = self._op(
            **self._unused,
            q=query,
            # [num_blocks, block_size, num_kv_heads, head_dim]: only the last dimension must be contiguous.
            k=cache.keys.transpose(1, 2),
            v=cache.values.transpose(1, 2),
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            page_table=metadata.block_tables,
            softmax_scale=scoring.scale,
            is_causal=True,
            window_size_left=window - 1 if window else -1,  # keys before the query's position
            window_size_right=0 if window else -1,
            softcap=scoring.softcap or 0.0,
            # 0: the op chooses by the number of queries; prompts have enough to fill the device.
            num_splits=_DECODE_SPLITS if metadata.max_query_len == 1 else 0,
            s_aux=None if scoring.sinks is None else scoring.sinks.bfloat16(),
        )
        out: torch.Tensor = results[0]
        return out

    @cached_property
    def _op(self) -> Any:
        """The op, from the library if the process has already loaded it, or from vLLM's package."""
        operators = getattr(torch.ops, NAMESPACE)
        if not hasattr(operators, "fwd"):
            _load_from_package()
        return operators.fwd.default

    @cached_property
    def _unused(self) -> dict[str, Any]:
        """Return the op's remaining arguments. Raises `Unavailable` for an unsupported schema."""
        _ = self._op  # loads the library
        (schema,) = torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::fwd")
        arguments = [each for each in schema.arguments if each.name not in _GIVEN]
        missing = _GIVEN - {each.name for each in schema.arguments}
        unknown = {
            each.name
            for each in arguments
            if each.name not in _FIXED and each.type.kind() != "OptionalType" and not each.has_default_value()
        }
        if missing or unknown:
            names = ", ".join(sorted(missing | unknown))
            raise Unavailable(f"FlashAttention 3 of an unsupported version: {names}; install vllm 0.23")
        return {
            each.name: each.default_value if each.has_default_value() else _FIXED.get(each.name)
            for each in arguments
        }


def _load_from_package() -> None:
    version = torch.__version__
    spec = find_spec("vllm")  # not imported: only its library is used
    paths = [Path(folder) / _FILE for folder in (spec and spec.submodule_search_locations) or ()]
    library = next((path for path in paths if path.is_file()), None)
    if library is None:
        raise Unavailable(
            "FlashAttention 3 is not installed; install the release of vllm that was built for "
            f"torch {version}, for torch 2.11: pip install --no-deps vllm==0.23.0"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise Unavailable(f"{library} was not built for torch {version}: {error}") from error
