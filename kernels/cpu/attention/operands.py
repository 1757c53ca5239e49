"""Operands of the attention kernels, by address. Kernels build them at the start and pass them down."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pagemill.kernels.cpu.jit.compiler import i32_pointer, jit
from pagemill.kernels.cpu.jit.element import size_of
from pagemill.kernels.cpu.jit.row import F32, I32, LOG2_E
from pagemill.kernels.types.window import first_visible as first_visible_key


class Queries(NamedTuple):
    """fp32 [num_tokens, num_kv_heads * group, head_dim]: the contiguous results and the strided queries."""

    out: int
    query: int
    token_stride: int
    head_stride: int
    group: int  # query heads per KV head


class Paged(NamedTuple):
    """A layer's keys and values: per block, one tile [block_size, head_dim] per KV head.

    Refers to all heads, or is moved to one of them (`of_kv_head`).
    """

    element: Any
    keys: int
    values: int
    key_scales: int  # 0 = none
    value_scales: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Tables(NamedTuple):
    """Block tables: address of the first row's table, and the stride between rows in entries."""

    rows: int
    stride: int


class Rules(NamedTuple):
    """Rules that turn scores into weights, for all query heads or moved to one of them (`of_head`)."""

    scale: np.float32  # of queries; scores are in units of log 2, or fractions of the cap
    window: int  # of `first_visible`
    softcap: np.float32  # 0 = none; in units of log 2
    slopes: int  # 0 = none
    sinks: int  # 0 = none


first_visible = jit(first_visible_key)


@jit
def of_token(queries, token, head, cache):
    """Return the operands from one token and query head."""
    out = queries.out + F32 * (token * cache.num_kv_heads * queries.group + head) * cache.head_dim
    query = queries.query + F32 * (token * queries.token_stride + head * queries.head_stride)
    return Queries(out, query, queries.token_stride, queries.head_stride, queries.group)


@jit
def rules_of(scale, window, softcap, slopes, sinks):
    factor = np.float32(scale) * LOG2_E if softcap == 0.0 else np.float32(scale / softcap)
    return Rules(factor, window, np.float32(softcap) * LOG2_E, slopes, sinks)


@jit
def of_head(rules, head):
    """Return the rules of the query heads from `head`."""
    slopes = rules.slopes + F32 * head if rules.slopes != 0 else 0
    sinks = rules.sinks + F32 * head if rules.sinks != 0 else 0
    return Rules(rules.scale, rules.window, rules.softcap, slopes, sinks)


@jit
def key_bytes_of(cache):
    return size_of(cache.element) * cache.head_dim


@jit
def block_bytes_of(cache):
    """Distance between a head's tiles."""
    return cache.num_kv_heads * cache.block_size * key_bytes_of(cache)


@jit
def scale_bytes_of(cache):
    """Distance between the scales of one head in adjacent blocks."""
    return F32 * cache.num_kv_heads * cache.block_size


@jit
def of_kv_head(cache, kv_head):
    """Return the cache from the first tile and scale of one KV head."""
    offset, scale_offset = kv_head * cache.block_size * key_bytes_of(cache), F32 * kv_head * cache.block_size
    return Paged(
        cache.element,
        cache.keys + offset,
        cache.values + offset,
        cache.key_scales + scale_offset if cache.key_scales != 0 else 0,
        cache.value_scales + scale_offset if cache.value_scales != 0 else 0,
        cache.num_kv_heads,
        cache.head_dim,
        cache.block_size,
    )


@jit
def table_of(tables, row):
    return i32_pointer(tables.rows + I32 * row * tables.stride)
