"""The steps of a decoder layer in machine code: its operators, called on records of addresses.

`layer` is a record of `layer.py`, a layer's weights. `step` is a record of `step_buffers.py`, the state that
the layers of a step share.
"""

from __future__ import annotations

from pagemill.kernels.cpu.attention.decode import decode
from pagemill.kernels.cpu.attention.prefill import prefill
from pagemill.kernels.cpu.cache import write_tokens
from pagemill.kernels.cpu.fused_rows import rms_norm_parallel, rms_norm_rows, rotate_rows
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import NUMBERS_PER_THREAD, external, f32_pointer, i64_pointer, jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR, ZERO, fill, line_in
from pagemill.kernels.cpu.jit.threads import launch, launch_rows
from pagemill.kernels.cpu.matmul import converted, converted_mlp, fp32, fp32_mlp
from pagemill.kernels.cpu.matmul.kinds import by_kind
from pagemill.kernels.cpu.matmul.work_sharing import (
    BLOCK_ROWS,
    are_rows_taken,
    new_counter,
    plan_blocks,
    take,
)

# The kernels of converted rows also receive the kind.
_multiply_rows = by_kind(fp32.multiply_block, converted.multiply_block)
_multiply_parallel = by_kind(fp32.multiply_parallel, converted.multiply_parallel)
_mlp_rows = by_kind(fp32_mlp.mlp_rows, converted_mlp.mlp_rows)
_mlp_parallel = by_kind(fp32_mlp.mlp_parallel, converted_mlp.mlp_parallel)


@jit
def _qkv_size(layer):
    return (layer[0].num_heads + 2 * layer[0].num_kv_heads) * layer[0].head_dim


@jit
def _share(num_threads, num_numbers):
    return max(1, min(num_threads, num_numbers // NUMBERS_PER_THREAD))


@jit
def _norm(num_threads, num_rows, x, weight, residual, total, out, size, eps):
    rms_norm_parallel(num_threads, num_rows, x, weight, residual, total, out, size, size, size, size, eps)


@jit
def _norm_heads(x, num_heads, head_dim, weight, eps):
    rms_norm_rows(0, num_heads, x, weight, 0, 0, x, head_dim, 0, head_dim, head_dim, eps)


@jit
def _place_tokens(first, last, element, layer, step, cos, sin, stride, half):
    """Normalize and rotate the tokens' queries and keys, and write keys and values to the cache."""
    heads, kv_heads, head_dim = layer[0].num_heads, layer[0].num_kv_heads, layer[0].head_dim
    row = (heads + 2 * kv_heads) * head_dim
    key, value = F32 * heads * head_dim, F32 * (heads + kv_heads) * head_dim
    for token in range(first, last):
        query = step[0].qkv + F32 * token * row
        if layer[0].q_norm != 0:
            _norm_heads(query, heads, head_dim, layer[0].q_norm, layer[0].qk_eps)
            _norm_heads(query + key, kv_heads, head_dim, layer[0].k_norm, layer[0].qk_eps)
        if half != 0:  # keys follow the queries, so both are rotated together
            at = F32 * token * stride
            rotate_rows(
                0, 1, query, row, head_dim, heads + kv_heads, cos + at, sin + at, stride, stride, half
            )
    write_tokens(
        first, last, element, step[0].qkv + key, row, head_dim, step[0].qkv + value, row, head_dim,
        layer[0].key_cache, layer[0].value_cache, layer[0].key_scales, layer[0].value_scales,
        layer[0].limit, step[0].slot_mapping, kv_heads, layer[0].block_size, head_dim,
    )  # fmt: skip


@jit
def _attend(element, layer, step, num_threads):
    heads, kv_heads, head_dim = layer[0].num_heads, layer[0].num_kv_heads, layer[0].head_dim
    group, row = heads // kv_heads, (heads + 2 * kv_heads) * head_dim
    if step[0].num_decode_rows > 0:
        decode(
            step[0].attended, step[0].qkv, row, head_dim, element, layer[0].key_cache, layer[0].value_cache,
            layer[0].key_scales, layer[0].value_scales, step[0].block_tables, step[0].block_table_stride,
            step[0].seq_lens, step[0].sharing, step[0].num_decode_rows, kv_heads, group, head_dim,
            layer[0].block_size, layer[0].scale, layer[0].window, layer[0].softcap, layer[0].slopes,
            layer[0].sinks, num_threads,
        )  # fmt: skip
    if step[0].num_decode_rows < step[0].num_rows:
        prefill(
            step[0].attended, step[0].qkv, row, head_dim, element, layer[0].key_cache, layer[0].value_cache,
            layer[0].key_scales, layer[0].value_scales, step[0].block_tables, step[0].block_table_stride,
            step[0].query_start_loc, step[0].seq_lens, step[0].num_decode_rows, step[0].num_rows,
            step[0].num_tokens, kv_heads, group, head_dim, layer[0].block_size, layer[0].scale,
            layer[0].window, layer[0].softcap, layer[0].slopes,
            layer[0].sinks, num_threads,
        )  # fmt: skip
    if step[0].num_padded > 0:
        used = step[0].num_tokens - step[0].num_padded
        fill(step[0].attended + F32 * used * heads * head_dim, step[0].num_padded * heads * head_dim, ZERO)


@jit
def _add(target, source, count):
    whole = F32 * count // VECTOR * VECTOR
    for at in range(0, whole, VECTOR):
        vector.store(target + at, vector.add(vector.load(target + at), vector.load(source + at)))
    for i in range(whole // F32, count):
        f32_pointer(target)[i] = f32_pointer(target)[i] + f32_pointer(source)[i]


@jit
def _project_rows(kind, layer, hidden, num_rows, normed, qkv):
    size, row = layer[0].hidden_size, _qkv_size(layer)
    rms_norm_rows(
        0, num_rows, hidden, layer[0].input_norm, 0, 0, normed, size, size, size, size, layer[0].eps
    )
    _multiply_rows(
        kind, qkv, normed, size, layer[0].qkv, layer[0].qkv_format, layer[0].qkv_bias, num_rows, row, size
    )


@jit
def _project_taken(thread, kind, layer, step, hidden, counter, bounds):
    size = layer[0].hidden_size
    block = take(line_in(counter))
    while block < len(bounds) - 1:
        first, last = bounds[block], bounds[block + 1]
        at = F32 * size * first
        qkv = step[0].qkv + F32 * _qkv_size(layer) * first
        _project_rows(kind, layer, hidden + at, last - first, step[0].normed + at, qkv)
        block = take(line_in(counter))


@external(allocates=True)
def project(kind, layer, step, hidden, num_threads):
    """qkv = projection of the normalized hidden states."""
    size, num_tokens = layer[0].hidden_size, step[0].num_tokens
    if are_rows_taken(num_tokens, num_threads):
        bounds = plan_blocks(num_tokens, num_threads)
        launch(_project_taken, num_threads, (kind, layer, step, hidden, new_counter(), bounds))
        return
    shares = _share(num_threads, num_tokens * size)
    _norm(shares, num_tokens, hidden, layer[0].input_norm, 0, 0, step[0].normed, size, layer[0].eps)
    _multiply_parallel(
        kind, step[0].qkv, step[0].normed, size, layer[0].qkv, layer[0].qkv_format, layer[0].qkv_bias, num_tokens,
        _qkv_size(layer), size, num_threads,
    )  # fmt: skip


@external
def place_and_attend(element, layer, step, cos, sin, stride, half, num_threads):
    """attended = attention over the cache, including this step's keys and values."""
    row = (layer[0].num_heads + 2 * layer[0].num_kv_heads) * layer[0].head_dim
    shares = _share(num_threads, step[0].num_tokens * row)
    arguments = (element, layer, step, cos, sin, stride, half)
    launch_rows(_place_tokens, shares, step[0].num_tokens, arguments)
    _attend(element, layer, step, num_threads)


@external
def finish(kind, layer, step, hidden, has_next, num_threads):
    """hidden += projection of the attention output, then hidden += mlp(norm(hidden)).

    In the last layer, only for the tokens that are read.
    """
    if has_next or step[0].num_read == step[0].num_tokens:
        _finish_rows(kind, layer, step, hidden, step[0].num_tokens, num_threads)
        return
    # Move them to the front: attention outputs in place, because tokens ascend, and hidden states to the
    # memory of queries, keys and values.
    width, size, front = layer[0].num_heads * layer[0].head_dim, layer[0].hidden_size, step[0].qkv
    for i in range(step[0].num_read):
        token = i64_pointer(step[0].read_tokens)[i]
        _copy(step[0].attended + F32 * i * width, step[0].attended + F32 * token * width, width)
        _copy(front + F32 * i * size, hidden + F32 * token * size, size)
    _finish_rows(kind, layer, step, front, step[0].num_read, num_threads)
    for i in range(step[0].num_read):
        _copy(hidden + F32 * i64_pointer(step[0].read_tokens)[i] * size, front + F32 * i * size, size)


@jit
def _copy(target, source, count):
    for i in range(count):
        f32_pointer(target)[i] = f32_pointer(source)[i]


@jit
def _finish_block(kind, layer, hidden, attended, normed, gated, num_rows):
    size, width = layer[0].hidden_size, layer[0].num_heads * layer[0].head_dim
    _multiply_rows(
        kind, normed, attended, width, layer[0].o, layer[0].o_format, layer[0].o_bias, num_rows, size, width
    )
    # The sum goes to `hidden`, its norm to `normed`: every value is read before it is overwritten.
    norm, eps = layer[0].post_attention_norm, layer[0].eps
    rms_norm_rows(0, num_rows, normed, norm, hidden, hidden, normed, size, size, size, size, eps)
    _mlp_rows(kind, layer, normed, gated, num_rows)
    _add(hidden, normed, num_rows * size)


@jit
def _finish_taken(thread, kind, layer, step, hidden, counter, bounds, gated_bytes):
    size, width = layer[0].hidden_size, layer[0].num_heads * layer[0].head_dim
    gated = step[0].gated + gated_bytes * thread
    block = take(line_in(counter))
    while block < len(bounds) - 1:
        first, last = bounds[block], bounds[block + 1]
        at, attended = F32 * size * first, step[0].attended + F32 * width * first
        _finish_block(kind, layer, hidden + at, attended, step[0].normed + at, gated, last - first)
        block = take(line_in(counter))


@jit(allocates=True)
def _finish_blocks(kind, layer, step, hidden, num_rows, num_threads):
    counter, bounds = new_counter(), plan_blocks(num_rows, num_threads)
    gated_bytes = F32 * min(num_rows, BLOCK_ROWS) * layer[0].intermediate_size
    launch(_finish_taken, num_threads, (kind, layer, step, hidden, counter, bounds, gated_bytes))


@jit
def _finish_rows(kind, layer, step, hidden, num_rows, num_threads):
    if num_rows == 0:
        return
    if are_rows_taken(num_rows, num_threads):
        _finish_blocks(kind, layer, step, hidden, num_rows, num_threads)
        return
    size, width, normed = layer[0].hidden_size, layer[0].num_heads * layer[0].head_dim, step[0].normed
    _multiply_parallel(
        kind, normed, step[0].attended, width, layer[0].o, layer[0].o_format, layer[0].o_bias, num_rows, size, width,
        num_threads,
    )  # fmt: skip
    shares = _share(num_threads, num_rows * size)
    _norm(shares, num_rows, normed, layer[0].post_attention_norm, hidden, hidden, normed, size, layer[0].eps)
    _mlp_parallel(kind, layer, normed, step[0].gated, num_rows, num_threads)
    _add(hidden, normed, num_rows * size)
