"""Random paged steps for the attention sections, the cases to check against fp64, and libraries to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import models
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels import dispatch, reference
from pagemill.kernels.dispatch import FaceName
from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.gpu.flash_attention import FlashAttention3
from pagemill.kernels.gpu.flashinfer import FlashInfer
from pagemill.kernels.types.layer_cache import FP8, LayerCache, as_bytes
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring
from tests.kernels import fa3_op
from tests.kernels.paged_case import TOLERANCE, PagedCase, assert_close, make_case

TOY = Shape("toy", 2, 1, 64)
LLAMA_8B, QWEN_600M = models.LLAMA_8B.attention, models.QWEN_600M.attention
FALCON_7B = Shape("falcon-7b", 71, 1, 64)
GPT2 = Shape("gpt2", 12, 12, 64)
GEMMA_2B = Shape("gemma-2b", 8, 1, 256)

# One timed call runs over enough layers that none of their keys is still in the L2 cache (60 MB on an H200)
# when it is needed.
_BYTES_PER_CALL = 512 * 2**20
_MOST_LAYERS = 32
_PROBED_TOKENS = 64

Attend = Callable[[torch.Tensor, LayerCache, AttentionMetadata, Scoring], torch.Tensor]
"""`pagemill.kernels.dispatch.paged_attention`, or a library instead."""


@dataclass
class Workload:
    """A step over several layers with random contents and shuffled blocks."""

    query: torch.Tensor
    layers: list[LayerCache]
    metadata: AttentionMetadata
    scoring: Scoring
    face: FaceName

    @property
    def is_dense(self) -> bool:
        """Return True if all rows are equal, without partial blocks, and either decode or are complete prompts."""
        metadata = self.metadata
        kinds = set(zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True))
        query_len, seq_len = next(iter(kinds))
        is_whole = seq_len % self.layers[0].block_size == 0 and not self.layers[0].is_scaled
        return len(kinds) == 1 and is_whole and query_len in (1, seq_len)

    def run(self, attend: Attend = dispatch.paged_attention) -> None:
        with dispatch.override(self.face):
            for layer in self.layers:
                attend(self.query, layer, self.metadata, self.scoring)

    def error(self, attend: Attend = dispatch.paged_attention) -> float:
        """Return the largest difference from fp64 over the last tokens of the first and of the last row."""
        metadata, layer = self.metadata, self.layers[0]
        with dispatch.override(self.face):
            out = attend(self.query, layer, metadata, self.scoring).double()
        ends, errors = metadata.query_start_loc.tolist()[1:], list[torch.Tensor]()
        for row in {0, len(ends) - 1}:
            count = min(_PROBED_TOKENS, metadata.query_lens_host[row])
            tokens = slice(ends[row] - count, ends[row])
            probe = replace(
                metadata,
                block_tables=metadata.block_tables[row : row + 1],
                query_lens_host=[count],
                seq_lens_host=[metadata.seq_lens_host[row]],
            )
            truth = reference.paged_attention(self.query[tokens].double(), layer, probe, self.scoring)
            errors.append((out[tokens] - truth).abs().max())
        return torch.stack(errors).max().item()  # NaN if any is


def load_fa3(bench: Bench) -> FlashAttention3:
    """Return FlashAttention 3 from `--fa3` or vLLM's package; a stand-in on toy shapes. Raises OSError, Unavailable."""
    if bench.is_tiny:
        fa3_op.register()
    elif bench.fa3 is not None:
        torch.ops.load_library(bench.fa3)  # type: ignore[no-untyped-call]
    library = FlashAttention3()
    library.require(bench.device)
    return library


def peer_rows(bench: Bench, workload: Workload, ours: Row, amount: float) -> Iterator[Row]:
    """The same step with libraries: `ours` with their times, shares and errors.

    Args:
        amount: amount per layer of the unit of the rate in `ours`'s first fact.
    """
    peers: list[tuple[str, Attend, bool]] = []
    if not workload.layers[0].is_scaled:
        with suppress(OSError, Unavailable):  # the section fa3 reports the reason
            peers.append(("FA3", load_fa3(bench).attend, True))
    if workload.metadata.max_query_len > 1 and not workload.layers[0].is_scaled:
        with suppress(Unavailable):
            (library := FlashInfer()).require(bench.device)
            peers.append(("FlashInfer", library.attend, True))
    if workload.is_dense:
        peers.append(("cuDNN", _dense_attention, False))  # over other keys, so there is no error to report
    for name, attend, is_paged in peers:
        facts: dict[str, Any] = {}
        seconds = None
        try:
            seconds = bench.measure(partial(workload.run, attend)) / len(workload.layers)
            facts[next(iter(ours.facts))] = round(amount / seconds, 1)
            if is_paged:
                facts["error"] = float(f"{workload.error(attend):.2g}")
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # not an unsupported shape but a lost device
                raise
            facts["why"] = str(error).splitlines()[0][:200]
        yield replace(
            ours,
            case=f"{name}: {ours.case}",
            measured=seconds,
            target=None,
            ok=facts["error"] <= TOLERANCE[torch.bfloat16] if "error" in facts else None,
            facts=facts,
        )


def _dense_attention(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """torch's attention through cuDNN, over the pool's bytes as keys without blocks: only its time is meaningful."""
    rows, (num_heads, head_dim) = len(metadata.seq_lens_host), query.shape[1:]
    queries = query.view(rows, -1, num_heads, head_dim).transpose(1, 2)
    keys, values = (pool.view(rows, cache.num_kv_heads, -1, head_dim) for pool in (cache.keys, cache.values))
    library = SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.MATH
    with sdpa_kernel(library):
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=metadata.max_query_len > 1, scale=scoring.scale, enable_gqa=True
        )


def num_layers_of(bench: Bench, layer_bytes: int) -> int:
    """Return the number of layers for one timed call."""
    return 1 if bench.is_tiny else min(_MOST_LAYERS, max(1, _BYTES_PER_CALL // layer_bytes))


def key_bytes(shape: Shape, cache_dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of one token's key and value in a layer, with the scales of their heads."""
    scales = 4 if cache_dtype.itemsize == 1 else 0
    return 2 * shape.num_kv_heads * (shape.head_dim * cache_dtype.itemsize + scales)


def make_workload(
    bench: Bench,
    shape: Shape,
    rows: Sequence[tuple[int, int]],
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    num_layers: int = 1,
) -> Workload:
    """`rows`: (query length, sequence length) of each; decoding rows come first."""
    device = bench.device
    query_lens, seq_lens = ([row[place] for row in rows] for place in (0, 1))
    torch.manual_seed(0)
    blocks_of = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    tables = torch.zeros((len(seq_lens), max(blocks_of)), dtype=torch.int32)
    blocks = torch.randperm(sum(blocks_of)).to(torch.int32)
    for row, part in enumerate(torch.split(blocks, blocks_of)):
        tables[row, : len(part)] = part
    cache_shape = (sum(blocks_of), shape.num_kv_heads, block_size, shape.head_dim)

    return Workload(
        query=torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, device=device).bfloat16(),
        layers=[_random_layer(cache_shape, cache_dtype, device) for _ in range(num_layers)],
        metadata=AttentionMetadata(
            block_tables=tables.to(device),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            slot_mapping=torch.full((sum(query_lens),), -1, device=device),
            query_lens_host=list(query_lens),
            seq_lens_host=list(seq_lens),
            num_decode_rows=sum(query_len == 1 for query_len in query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        ),
        scoring=Scoring(shape.head_dim**-0.5),
        face=bench.face,
    )


def _random_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerCache:
    if dtype.itemsize > 1:
        keys, values = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))
        return LayerCache(keys, values)
    numbers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
    for tensor in numbers:  # of finite e4m3 bytes: none has all of its lower seven bits set
        as_bytes(tensor).random_(0, 0x7F)
    return LayerCache(*numbers, *(0.01 + torch.rand(shape[:3], device=device) / 100 for _ in range(2)))


_SHORT, _MIXED = ([1, 1, 1], [1, 16, 17]), ([1, 1, 40, 300], [700, 33, 40, 900])
_LONG = ([1, 1, 1500], [5000, 9000, 6000])
EVERY_CASE: list[tuple[tuple[list[int], list[int]], Shape, dict[str, Any]]] = [
    *((_MIXED, shape, {}) for shape in (LLAMA_8B, QWEN_600M, FALCON_7B, GPT2, GEMMA_2B)),
    *((_MIXED, Shape(f"dim {dim}", 6, 2, dim), {}) for dim in (80, 96)),
    *((_SHORT, LLAMA_8B, {"block_size": size}) for size in (8, 16, 24, 32, 64, 80, 128)),
    *((_MIXED, LLAMA_8B, {"block_size": size}) for size in (8, 24, 32, 64, 80, 128)),
    (_LONG, LLAMA_8B, {}),
    (_MIXED, LLAMA_8B, {"padded_decode_rows": 3, "padded_tokens": 5}),
    *(
        (_MIXED, shape, {"cache_dtype": dtype})
        for shape in (LLAMA_8B, GEMMA_2B)
        for dtype in (torch.int8, FP8)
    ),
    (_MIXED, LLAMA_8B, {"alibi": True}),
    (_MIXED, LLAMA_8B, {"softcap": 2.0}),
    (_MIXED, LLAMA_8B, {"sliding_window": 100, "free_outside_window": True}),
]


SINK_CASES: list[tuple[tuple[list[int], list[int]], Shape, dict[str, Any]]] = [
    (_MIXED, LLAMA_8B, {"sinks": True} | options) for options in ({}, {"sliding_window": 100})
]


def without_poison(case: PagedCase) -> PagedCase:
    """Return the case with zeros in unused slots and the first block instead of unused blocks."""
    metadata, cache = case.metadata, case.cache
    tables = metadata.block_tables.where(metadata.block_tables < len(cache.keys), 0)
    cache = cache.converted(torch.nan_to_num)
    return replace(case, cache=cache, metadata=replace(metadata, block_tables=tables))


def correctness(
    bench: Bench,
    cases: Sequence[tuple[tuple[list[int], list[int]], Shape, dict[str, Any]]],
    dtypes: Sequence[torch.dtype],
    attend: Attend = dispatch.paged_attention,
    prepare: Callable[[PagedCase], PagedCase] = lambda case: case,
) -> Iterator[Row]:
    """Each case's largest error against the reference in fp64, over NaN-poisoned caches."""
    for ((query_lens, seq_lens), shape, options), dtype in product(cases, dtypes):
        case = make_case(
            query_lens,
            seq_lens,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            **options,
        )
        case = prepare(case.to(bench.device))
        with dispatch.override(bench.face):
            out = attend(case.query, case.cache, case.metadata, case.scoring)
        double = case.in_double()
        truth = reference.paged_attention(double.query, double.cache, double.metadata, double.scoring)
        real = case.real_tokens().to(bench.device)
        facts = {"dtype": str(dtype).removeprefix("torch."), "limit": TOLERANCE[dtype]}
        try:
            assert_close(out, truth, case, TOLERANCE[dtype])
        except AssertionError as error:
            facts["why"] = str(error)
        yield Row(
            case=f"attention, {shape.name} {query_lens}/{seq_lens} {options or ''}".rstrip(),
            measured=(out.double() - truth)[real].abs().max().item(),
            unit="error",
            ok="why" not in facts,
            facts=facts,
        )
