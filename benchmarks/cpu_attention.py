"""Time the CPU operators at a small model's shapes (9 heads, 3 KV heads of 64, 30 layers) against plain torch.

    python -m benchmarks.cpu_attention [num_threads]    # all but the last part
    python -m benchmarks.cpu_attention shared           # attention of rows that begin with the same blocks

Every figure is the best of many runs, in microseconds a layer. "cold" walks 30 layers' caches in turn, as a step
does; "hot" repeats one layer. Compare within one run only.

"shared" measures processor time on one thread, rows together and each on its own by turns, and their ratio's median.
"""

from __future__ import annotations

import itertools
import operator
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from pagemill.kernels import reference
from pagemill.kernels.cpu import fused_rows
from pagemill.kernels.cpu import operators as cpu
from pagemill.kernels.types.layer_cache import LayerCache, allocate_layer
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 16, 30
HIDDEN, INTERMEDIATE = 576, 1536
SCALE = HEAD_DIM**-0.5
SCORING = Scoring(SCALE)
SHARED_ROWS, SHARED_TOKENS, OWN_TOKENS = (4, 16, 32, 64), (256, 1024, 4096), 32


def best(function: Callable[[], object], seconds: float = 0.5) -> float:
    """Microseconds of the fastest call."""
    function()
    fastest, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e6


def make_metadata(query_len: int, seq_len: int, num_rows: int) -> AttentionMetadata:
    blocks_per_row = -(-seq_len // BLOCK_SIZE)
    tables = torch.randperm(num_rows * blocks_per_row).view(num_rows, blocks_per_row).int()
    positions = torch.arange(seq_len - query_len, seq_len)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        block_tables=tables,
        query_start_loc=torch.arange(0, (num_rows + 1) * query_len, query_len, dtype=torch.int32),
        seq_lens=torch.full((num_rows,), seq_len, dtype=torch.int32),
        slot_mapping=slots.flatten(),
        query_lens_host=[query_len] * num_rows,
        seq_lens_host=[seq_len] * num_rows,
        num_decode_rows=num_rows if query_len == 1 else 0,
        max_query_len=query_len,
        max_seq_len=seq_len,
    )


def inverted(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_rows: int, tables: torch.Tensor
):
    """Decode in plain torch without copying keys: queries go to their blocks. Full blocks only."""
    group = NUM_HEADS // NUM_KV_HEADS
    owner = torch.empty(keys.shape[0], dtype=torch.long)
    owner[tables.flatten().long()] = torch.arange(num_rows).repeat_interleave(tables.shape[1])

    def attend() -> torch.Tensor:
        q = (query * SCALE).view(num_rows, NUM_KV_HEADS, group, HEAD_DIM).index_select(0, owner)
        scores = q @ keys.transpose(-1, -2)
        largest = torch.full((num_rows, NUM_KV_HEADS, group), -1e30)
        largest.index_reduce_(0, owner, scores.amax(-1), "amax")
        weights = scores.sub_(largest.index_select(0, owner)[..., None]).exp_()
        total = torch.zeros_like(largest).index_add_(0, owner, weights.sum(-1))
        out = torch.zeros(num_rows, NUM_KV_HEADS, group, HEAD_DIM).index_add_(0, owner, weights @ values)
        return out.div_(total[..., None]).view(num_rows, NUM_HEADS, HEAD_DIM)

    return attend


def decode_table() -> None:
    print(f"{'decode':>24} {'hot':>8} {'cold':>8} {'GB/s':>6} {'step, ms':>9} {'inverted torch, hot':>20}")
    for num_rows, seq_len in [(1, 128), (8, 128), (32, 128), (128, 128), (8, 1024), (1, 4096)]:
        metadata = make_metadata(1, seq_len, num_rows)
        shape = (num_rows * -(-seq_len // BLOCK_SIZE), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        layers = [LayerCache(torch.randn(shape), torch.randn(shape)) for _ in range(NUM_LAYERS)]
        query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM)
        turn = itertools.cycle(layers)

        def step(layers=layers, query=query, metadata=metadata) -> None:
            for layer in layers:
                cpu.paged_attention(query, layer, metadata, SCORING)

        layer = next(turn)
        in_torch = inverted(query, layer.keys, layer.values, num_rows, metadata.block_tables)
        ours = cpu.paged_attention(query, layer, metadata, SCORING)
        torch.testing.assert_close(in_torch(), ours, rtol=1e-4, atol=1e-4)
        hot = best(lambda q=query, c=layer, m=metadata: cpu.paged_attention(q, c, m, SCORING))
        cold = best(step, 2.0) / NUM_LAYERS
        gigabytes = 8 * num_rows * seq_len * NUM_KV_HEADS * HEAD_DIM / cold / 1e3
        label = f"{num_rows} rows x {seq_len}"
        print(
            f"{label:>24} {hot:8.0f} {cold:8.0f} {gigabytes:6.1f} {cold * NUM_LAYERS / 1e3:9.2f} {best(in_torch):20.0f}"
        )


def prefill_table() -> None:
    print(f"\n{'prefill':>24} {'ours':>8} {'gather + torch':>15}")
    for query_len, seq_len in [(40, 296), (64, 64), (512, 512), (16, 1024)]:
        metadata = make_metadata(query_len, seq_len, 1)
        shape = (-(-seq_len // BLOCK_SIZE), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        keys, values = torch.randn(shape), torch.randn(shape)
        query = torch.randn(query_len, NUM_HEADS, HEAD_DIM)
        visible = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)

        def in_torch(
            metadata=metadata, keys=keys, values=values, query=query, visible=visible
        ) -> torch.Tensor:
            blocks = metadata.block_tables[0]
            k, v = (x.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, None] for x in (keys, values))
            k, v = (x[:, :, : visible.shape[1]].expand(-1, NUM_HEADS // NUM_KV_HEADS, -1, -1) for x in (k, v))
            packed = query.view(query.shape[0], NUM_KV_HEADS, -1, HEAD_DIM).permute(1, 2, 0, 3)
            out = F.scaled_dot_product_attention(packed, k, v, attn_mask=visible, scale=SCALE)
            return out.permute(2, 0, 1, 3).reshape(query.shape)

        def ours(metadata=metadata, keys=keys, values=values, query=query) -> torch.Tensor:
            return cpu.paged_attention(query, LayerCache(keys, values), metadata, SCORING)

        torch.testing.assert_close(in_torch(), ours(), rtol=1e-4, atol=1e-4)
        print(f"{f'{query_len} of {seq_len}':>24} {best(ours):8.0f} {best(in_torch):15.0f}")


def fused_table() -> None:
    print(f"\n{'rows':>24} {'operator':>18} {'ours':>8} {'torch':>8}")
    weight = torch.randn(HIDDEN)

    def torch_norm(x: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def torch_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]

    for n in (8, 32, 128):
        x, gate_up = torch.randn(n, HIDDEN), torch.randn(n, 2 * INTERMEDIATE)
        packed = torch.randn(n, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        q, k, v = packed.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        cos, sin = torch.ones(n, HEAD_DIM), torch.zeros(n, HEAD_DIM)
        slots = torch.randperm(n * BLOCK_SIZE)[:n]
        caches = torch.zeros(2, n, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).unbind()
        gate, up = gate_up.chunk(2, dim=1)
        pairs = {
            "add_rms_norm": (
                lambda x=x: fused_rows.add_rms_norm(x, x, weight, 1e-5),
                lambda x=x: torch_norm(x + x),
            ),
            "silu_and_mul": (
                lambda gate_up=gate_up: fused_rows.silu_and_mul(gate_up),
                lambda gate=gate, up=up: F.silu(gate) * up,
            ),
            "rotary_embedding": (
                lambda a=(q, k, cos, sin): fused_rows.rotary_embedding(*a),
                lambda q=q, k=k, a=(cos, sin): (torch_rotary(q, *a), torch_rotary(k, *a)),
            ),
            "reshape_and_cache": (
                lambda a=(k, v, *caches, slots): cpu.reshape_and_cache(*a),
                lambda a=(k, v, *caches, slots): reference.reshape_and_cache(*a),
            ),
        }
        for name, (ours, in_torch) in pairs.items():
            print(f"{n:>24} {name:>18} {best(ours):8.0f} {best(in_torch):8.0f}")


def shared_metadata(num_rows: int, shared: int, own: int, query_len: int = 1) -> AttentionMetadata:
    """Rows that begin with the same `shared` tokens and go on with `own` of theirs."""
    metadata = make_metadata(query_len, shared + own, num_rows)
    num_shared = shared // BLOCK_SIZE
    num_own = metadata.block_tables.shape[1] - num_shared
    blocks = torch.randperm(num_shared + num_rows * num_own).int()
    metadata.block_tables[:, :num_shared] = blocks[:num_shared]
    metadata.block_tables[:, num_shared:] = blocks[num_shared:].view(num_rows, num_own)
    return metadata


def by_turns(*functions: Callable[[], object], rounds: int = 9) -> list[list[float]]:
    """Microseconds of processor time of each function, round by round."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):  # the first is for the caches
        for function, found in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            found.append((time.process_time() - start) * 1e6)
    return [found[1:] for found in times]


def shared_table() -> None:
    print(f"{'one query a row':>42} {'apart':>9} {'together':>9} {'ratio':>6} {'GFLOP/s':>8}")
    shapes = [(9, 3, 64), (32, 8, 128)]
    cases = itertools.product(shapes, (torch.float32, torch.bfloat16, torch.int8), SHARED_TOKENS, SHARED_ROWS)
    for (num_heads, num_kv_heads, head_dim), dtype, shared, num_rows in cases:
        metadata = shared_metadata(num_rows, shared, OWN_TOKENS)
        num_blocks = int(metadata.block_tables.max()) + 1
        num_layers = 2 if num_rows * shared > 2**15 else 4
        layers = [
            allocate_layer(num_blocks, num_kv_heads, BLOCK_SIZE, head_dim, dtype) for _ in range(num_layers)
        ]
        for tensor in itertools.chain.from_iterable(layer.tensors() for layer in layers):
            tensor.copy_(torch.randint(-9, 9, tensor.shape[-1:]))
        query, scoring = torch.randn(num_rows, num_heads, head_dim), Scoring(head_dim**-0.5)
        apart = replace(metadata)
        apart.sharing = torch.empty(0, dtype=torch.int32)

        def step(metadata=metadata, layers=layers, query=query, scoring=scoring) -> torch.Tensor:
            return torch.stack([cpu.paged_attention(query, layer, metadata, scoring) for layer in layers])

        assert torch.equal(step(), step(apart))
        alone, together = by_turns(lambda step=step, apart=apart: step(apart), step)
        ratio = statistics.median(map(operator.truediv, alone, together))
        rate = 4e-3 * num_rows * (shared + OWN_TOKENS) * num_heads * head_dim * num_layers / min(together)
        name = f"{num_heads}/{num_kv_heads} x {head_dim} {str(dtype)[6:]}, {num_rows} rows x {shared}"
        print(
            f"{name:>42} {min(alone) / num_layers:9.0f} {min(together) / num_layers:9.0f} {ratio:6.2f} {rate:8.1f}"
        )


def shared_prompts_table() -> None:
    """Prompts that continue the same blocks, and others that continue copies of them."""
    print(f"\n{'40 queries a row':>42} {'copies':>9} {'shared':>9} {'ratio':>6}")
    for shared, num_rows in itertools.product(SHARED_TOKENS, SHARED_ROWS):
        length = shared + 40
        copies, metadata = make_metadata(40, length, num_rows), shared_metadata(num_rows, shared, 40, 40)
        shape = (int(copies.block_tables.max()) + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        layer = LayerCache(torch.randn(shape), torch.randn(shape))
        query = torch.randn(num_rows * 40, NUM_HEADS, HEAD_DIM)
        apart, together = by_turns(
            *(
                lambda metadata=metadata, layer=layer, query=query: cpu.paged_attention(
                    query, layer, metadata, SCORING
                )
                for metadata in (copies, metadata)
            )
        )
        ratio = statistics.median(map(operator.truediv, apart, together))
        name = f"{num_rows} rows x {shared}"
        print(f"{name:>42} {min(apart):9.0f} {min(together):9.0f} {ratio:6.2f}")


def main() -> None:
    if sys.argv[1:] == ["shared"]:
        torch.set_num_threads(1)
        torch.manual_seed(42)
        with torch.inference_mode():
            shared_table()
            shared_prompts_table()
        return
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    torch.manual_seed(42)
    warnings.filterwarnings("ignore", message="index_reduce")
    print(f"{torch.get_num_threads()} threads; microseconds, the best of many runs")
    with torch.inference_mode():
        decode_table()
        prefill_table()
        fused_table()


if __name__ == "__main__":
    main()
