"""The order in which a thread reads tiles of keys and values, and its prefetches.

Tiles are scattered, so hardware prefetchers cannot predict the next one. Loading a tile takes longer than
computing with it, so each is prefetched several tiles ahead.
"""

from __future__ import annotations

from pagemill.kernels.cpu.attention.decode_tasks import COUNT, KV_HEAD, SPLIT, part_of
from pagemill.kernels.cpu.attention.operands import key_bytes_of, table_of
from pagemill.kernels.cpu.jit.compiler import i64_pointer, jit, prefetch
from pagemill.kernels.cpu.jit.row import F32, VECTOR

ENTRY = 8
"""Bytes of a walk's entry: twice the tile's number, plus 1 for a tile of values."""
_AHEAD_BYTES = 8192


@jit
def _tile_bytes(cache):
    return cache.block_size * key_bytes_of(cache)


@jit
def _distance(cache):
    """Number of tiles between a prefetch and the use of the tile."""
    return max(1, _AHEAD_BYTES // _tile_bytes(cache))


@jit
def num_tiles(cache, begin, end):
    """Number of tiles that contain keys begin .. end - 1, a non-empty range."""
    return (end - 1) // cache.block_size - begin // cache.block_size + 1


@jit
def walk_bytes(cache, most_rows):
    """Bytes of a walk for a task of up to `most_rows` rows, including the entries after it."""
    return ENTRY * (2 * (most_rows + 1) * (SPLIT // cache.block_size + 2) + _distance(cache))


@jit
def list_walk(walk, task, following, rows, order, cache, tables):
    """List a task's tiles in reading order, and the first tiles of the following task for prefetches."""
    entries = i64_pointer(walk)
    count = _list_tiles(entries, 0, 1 << 62, task, rows, order, cache, tables)
    last = count + _distance(cache)
    count = _list_tiles(entries, count, last, following, rows, order, cache, tables)
    for entry in range(count, last):
        entries[entry] = entries[0]


@jit
def _list_tiles(entries, count, most, task, rows, order, cache, tables):
    """Append a task's tiles of keys, then of values, up to `most` entries. Returns the count."""
    for is_value in range(2):
        for part in range(task[COUNT] + 1):
            row, begin, end = part_of(part, task, rows, order)
            table = table_of(tables, row)
            first = begin // cache.block_size
            for block in range(first, first + num_tiles(cache, begin, end) if begin < end else first):
                if count == most:
                    return count
                entries[count] = 2 * (table[block] * cache.num_kv_heads + task[KV_HEAD]) + is_value
                count += 1
    return count


@jit
def tile_at(cache, walk):
    """Return the address of the tile at this position of a walk."""
    entry = i64_pointer(walk)[0]
    return (cache.values if entry & 1 else cache.keys) + (entry >> 1) * _tile_bytes(cache)


@jit
def scales_at(cache, walk):
    """Return the address of the tile's scales, in a cache that has scales."""
    entry = i64_pointer(walk)[0]
    scales = cache.value_scales if entry & 1 else cache.key_scales
    return scales + F32 * (entry >> 1) * cache.block_size


@jit
def tile_ahead(cache, walk, num_keys):
    """Return the address of the tile to prefetch while one of `num_keys` keys is read.

    The caller prefetches that many keys of it; this function prefetches the rest.
    """
    ahead = walk + ENTRY * _distance(cache)
    if cache.key_scales != 0:
        scales = scales_at(cache, ahead)
        for at in range(scales, scales + F32 * cache.block_size, VECTOR):
            prefetch(at)
    tile = tile_at(cache, ahead)
    for at in range(tile + num_keys // 4 * 4 * key_bytes_of(cache), tile + _tile_bytes(cache), VECTOR):
        prefetch(at)
    return tile
