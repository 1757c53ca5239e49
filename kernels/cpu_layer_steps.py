"""What a decoder layer does, in machine code: its operators, called on records of addresses.

`layer` and `step` are records of `cpu_layer`: what a layer is made of, and what all layers share within a step.
"""

from __future__ import annotations

from numba import prange, types
from numba.extending import overload

from kernels import cpu_int8_matmul, cpu_matmul
from kernels import cpu_vector as vector
from kernels.cpu_attention_decode import decode
from kernels.cpu_attention_prefill import prefill
from kernels.cpu_cache import write_tokens
from kernels.cpu_fused import (
    rms_norm_parallel,
    rms_norm_rows,
    rotate_rows,
    silu_and_mul_parallel,
    silu_and_mul_rows,
)
from kernels.cpu_jit import NUMBERS_PER_THREAD, f32_pointer, i64_pointer, jit
from kernels.cpu_row import F32, VECTOR, ZERO, fill

MLP_ROWS = 512
"""The MLP runs over so many tokens at a time: its intermediate results stay small, and in the cache."""


def _multiply(
    kind, weight_format, out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads
):
    """`multiply_parallel` of the module that packs weights of this kind; for compiled callers alone."""
    raise NotImplementedError


@overload(_multiply)
def _choose_product(
    kind, weight_format, out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads
):
    # Chosen while compiling, not by a branch: nobody compiles products of a kind that their model does not have.
    multiply_floats, multiply_integers = cpu_matmul.multiply_parallel, cpu_int8_matmul.multiply_parallel

    def run_floats(
        kind, weight_format, out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads
    ):
        multiply_floats(
            out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features, num_threads
        )

    def run_integers(
        kind, weight_format, out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads
    ):
        multiply_integers(out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads)

    return run_integers if kind == types.uint8 else run_floats


@jit
def _share(num_threads, num_numbers):
    return max(1, min(num_threads, num_numbers // NUMBERS_PER_THREAD))


@jit
def _norm(num_threads, num_rows, x, weight, residual, total, out, size, eps):
    if num_threads > 1:
        rms_norm_parallel(num_threads, num_rows, x, weight, residual, total, out, size, size, size, size, eps)
    else:
        rms_norm_rows(0, num_rows, x, weight, residual, total, out, size, size, size, size, eps)


@jit
def _norm_heads(x, num_heads, head_dim, weight, eps):
    rms_norm_rows(0, num_heads, x, weight, 0, 0, x, head_dim, 0, head_dim, head_dim, eps)


@jit
def _place_tokens(first, last, element, layer, step, cos, sin, stride, half):
    """Norm and rotate the tokens' queries and keys, and write keys and values to the cache."""
    heads, kv_heads, head_dim = layer[0].num_heads, layer[0].num_kv_heads, layer[0].head_dim
    row = (heads + 2 * kv_heads) * head_dim
    key, value = F32 * heads * head_dim, F32 * (heads + kv_heads) * head_dim
    for token in range(first, last):
        query = step[0].qkv + F32 * token * row
        if layer[0].q_norm != 0:
            _norm_heads(query, heads, head_dim, layer[0].q_norm, layer[0].qk_eps)
            _norm_heads(query + key, kv_heads, head_dim, layer[0].k_norm, layer[0].qk_eps)
        if half != 0:  # keys follow the queries: they are rotated together
            at = F32 * token * stride
            rotate_rows(
                0, 1, query, row, head_dim, heads + kv_heads, cos + at, sin + at, stride, stride, half
            )
    write_tokens(
        first, last, element, step[0].qkv + key, row, head_dim, step[0].qkv + value, row, head_dim,
        layer[0].key_cache, layer[0].value_cache, layer[0].key_scales, layer[0].value_scales,
        layer[0].limit, step[0].slot_mapping, kv_heads, layer[0].block_size, head_dim,
    )  # fmt: skip


@jit(parallel=True)
def _place(num_threads, element, layer, step, cos, sin, stride, half):
    num_tokens = step[0].num_tokens
    for thread in prange(num_threads):
        first, last = num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads
        _place_tokens(first, last, element, layer, step, cos, sin, stride, half)


@jit
def _attend(element, layer, step, num_threads):
    heads, kv_heads, head_dim = layer[0].num_heads, layer[0].num_kv_heads, layer[0].head_dim
    group, row = heads // kv_heads, (heads + 2 * kv_heads) * head_dim
    if step[0].num_decode_rows > 0:
        decode(
            step[0].attended, step[0].qkv, row, head_dim, element, layer[0].key_cache, layer[0].value_cache,
            layer[0].key_scales, layer[0].value_scales, step[0].block_tables, step[0].block_table_stride,
            step[0].seq_lens, step[0].num_decode_rows, kv_heads, group, head_dim, layer[0].block_size,
            step[0].max_seq_len, layer[0].scale, layer[0].window, layer[0].softcap, layer[0].slopes, num_threads,
        )  # fmt: skip
    if step[0].num_decode_rows < step[0].num_rows:
        prefill(
            step[0].attended, step[0].qkv, row, head_dim, element, layer[0].key_cache, layer[0].value_cache,
            layer[0].key_scales, layer[0].value_scales, step[0].block_tables, step[0].block_table_stride,
            step[0].query_start_loc, step[0].seq_lens, step[0].num_decode_rows, step[0].num_rows,
            step[0].num_tokens, kv_heads, group, head_dim, layer[0].block_size, layer[0].scale,
            layer[0].window, layer[0].softcap, layer[0].slopes, num_threads,
        )  # fmt: skip
    if step[0].num_padded > 0:
        used = step[0].num_tokens - step[0].num_padded
        fill(step[0].attended + F32 * used * heads * head_dim, step[0].num_padded * heads * head_dim, ZERO)


@jit
def _gate(num_threads, num_rows, gate_up, out, size):
    if num_threads > 1:
        silu_and_mul_parallel(num_threads, num_rows, gate_up, 2 * size, out, size)
    else:
        silu_and_mul_rows(0, num_rows, gate_up, 2 * size, out, size)


@jit
def _add(target, source, count):
    whole = F32 * count // VECTOR * VECTOR
    for at in range(0, whole, VECTOR):
        vector.store(target + at, vector.add(vector.load(target + at), vector.load(source + at)))
    for i in range(whole // F32, count):
        f32_pointer(target)[i] = f32_pointer(target)[i] + f32_pointer(source)[i]


@jit
def _mlp(kind, hidden, layer, step, num_rows, num_threads):
    """hidden += down(silu(gate) * up) of `normed`, whose rows take the products' results in turn."""
    size, inner = layer[0].hidden_size, layer[0].intermediate_size
    for begin in range(0, num_rows, MLP_ROWS):
        count, at = min(MLP_ROWS, num_rows - begin), F32 * begin * size
        normed = step[0].normed + at
        _multiply(
            kind, layer[0].gate_up_format, step[0].gate_up, normed, size, layer[0].gate_up, layer[0].gate_up_bias,
            count, 2 * inner, size, num_threads,
        )  # fmt: skip
        _gate(_share(num_threads, count * inner), count, step[0].gate_up, step[0].gated, inner)
        _multiply(
            kind, layer[0].down_format, normed, step[0].gated, inner, layer[0].down, layer[0].down_bias, count, size,
            inner, num_threads,
        )  # fmt: skip
        _add(hidden + at, normed, count * size)


@jit
def project(kind, layer, step, hidden, num_threads):
    """qkv = product of the normed hidden states."""
    size, num_tokens = layer[0].hidden_size, step[0].num_tokens
    row = (layer[0].num_heads + 2 * layer[0].num_kv_heads) * layer[0].head_dim
    shares = _share(num_threads, num_tokens * size)
    _norm(shares, num_tokens, hidden, layer[0].input_norm, 0, 0, step[0].normed, size, layer[0].eps)
    _multiply(
        kind, layer[0].qkv_format, step[0].qkv, step[0].normed, size, layer[0].qkv, layer[0].qkv_bias, num_tokens, row,
        size, num_threads,
    )  # fmt: skip


@jit
def place_and_attend(element, layer, step, cos, sin, stride, half, num_threads):
    """attended = attention over the cache, this step's keys and values included."""
    row = (layer[0].num_heads + 2 * layer[0].num_kv_heads) * layer[0].head_dim
    shares = _share(num_threads, step[0].num_tokens * row)
    _place(shares, element, layer, step, cos, sin, stride, half)
    _attend(element, layer, step, num_threads)


@jit
def finish(kind, layer, step, hidden, num_threads):
    """hidden += product of what was attended to, then hidden += mlp of that; of the tokens to be read alone."""
    if step[0].num_read == step[0].num_tokens:
        _finish_rows(kind, layer, step, hidden, step[0].num_tokens, num_threads)
        return
    # They move to the front: what was attended to in place, since tokens ascend, and the hidden states to where
    # queries, keys and values were.
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
def _finish_rows(kind, layer, step, hidden, num_rows, num_threads):
    size, width, normed = layer[0].hidden_size, layer[0].num_heads * layer[0].head_dim, step[0].normed
    _multiply(
        kind, layer[0].o_format, normed, step[0].attended, width, layer[0].o, layer[0].o_bias, num_rows, size, width,
        num_threads,
    )  # fmt: skip
    # The sum goes to `hidden`, its norm to `normed`: every number is read before its place is written.
    shares = _share(num_threads, num_rows * size)
    _norm(shares, num_rows, normed, layer[0].post_attention_norm, hidden, hidden, normed, size, layer[0].eps)
    _mlp(kind, hidden, layer, step, num_rows, num_threads)
