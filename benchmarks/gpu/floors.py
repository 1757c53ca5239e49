"""Floors and predictions of `benchmarks.gpu`: one cost model, with the device at its measured rates or as expected.

Every operator takes the larger of two times: the fewest bytes it must move at the bandwidth of a large copy, and its
floating-point operations at the rate of a large matrix product, both measured in the same run (the roofline model of
Williams, Waterman and Patterson, 2009). The operators of a layer depend on each other, so a step takes their sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.models import ModelShape
from pagemill.kernels.gpu.tuning import decode_splits


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates that everything is held against; NaN: not measured."""

    bytes_per_s: float
    """Of a copy, bytes read plus bytes written."""
    flops: float
    """Of a large product in bf16."""
    fp8_flops: float


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step of the engine."""

    rows: Sequence[tuple[int, int]]
    """(tokens computed, keys attended to) of each."""
    shared_keys: int = 0
    """Keys at the beginning of every row that are the same blocks: read once, at best."""

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.rows)

    @property
    def is_decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.rows)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of operators and steps. As it is: the floor; with shares below 1 and overheads: a prediction."""

    ceilings: Ceilings
    products: float = 1.0
    """Share of the ceiling that products reach; so on."""
    decode_attention: float = 1.0
    scaled_decode_attention: float = 1.0
    """Over a cache of fp8 or int8."""
    prefill_attention: float = 1.0
    rows: float = 1.0
    """Kernels that read rows and write rows."""
    series_tile_s: float = 0.0
    """A tile of keys, in a program that walks over its tiles one after the other."""
    filtered_logit_s: float = 0.0
    """Per logit, of sampling with top-k, top-p or min-p."""
    replayed_layer_s: float = 0.0
    """A layer's small kernels and the gaps between launches, where a step is a CUDA graph."""
    launched_layer_s: float = 0.0
    """The host's time to launch a layer where it is not; the device waits for it."""

    def seconds(self, num_bytes: float, operations: float = 0.0, *, share: float = 1.0) -> float:
        return max(num_bytes / self.ceilings.bytes_per_s, operations / self.ceilings.flops) / share

    def series(self, seq_lens: Sequence[int], num_kv_heads: int, tile_keys: int, processors: int) -> float:
        """The time of the longest row's split, whose tiles are walked one after the other: 0 for the floor."""
        splits = decode_splits(len(seq_lens) * num_kv_heads, max(seq_lens), processors)
        split_keys = max(splits.min_tokens, -(-max(seq_lens) // splits.most))
        return -(-split_keys // tile_keys) * self.series_tile_s

    def step(self, model: ModelShape, step: Step, *, fp8: bool = False) -> float:
        """One step of the engine, weights and cache in bf16; with fp8 the layers' products have fp8 weights."""
        tokens, layers = step.num_tokens, model.num_layers
        rate = self.ceilings.fp8_flops if fp8 else self.ceilings.flops
        weights = model.layer_weights * (1 if fp8 else 2)
        product = max(weights / self.ceilings.bytes_per_s, 2 * tokens * model.layer_weights / rate)
        head = self.seconds(2 * model.head_weights, 2 * len(step.rows) * model.head_weights)
        attention = self._attention(model, step)
        device = layers * (product / self.products + attention + self.replayed_layer_s) + head / self.products
        return device if step.is_decode else max(device, layers * self.launched_layer_s)

    def _attention(self, model: ModelShape, step: Step) -> float:
        decoded = [kv_len for query_len, kv_len in step.rows if query_len == 1]
        prefilled = [row for row in step.rows if row[0] > 1]
        heads, width = model.num_heads * model.head_dim, 4 * model.num_kv_heads * model.head_dim
        seconds = 0.0
        if decoded:
            keys = sum(decoded) - step.shared_keys * (len(decoded) - 1)
            seconds += self.seconds(keys * width, 4 * sum(decoded) * heads, share=self.decode_attention)
        if prefilled:
            keys = sum(kv_len for _, kv_len in prefilled) - step.shared_keys * (len(prefilled) - 1)
            operations = 4 * visible_keys(prefilled) * heads
            seconds += self.seconds(keys * width, operations, share=self.prefill_attention)
        return seconds

    def workload(self, model: ModelShape, steps: Sequence[Step], *, fp8: bool = False) -> float:
        return sum(self.step(model, step, fp8=fp8) for step in steps)


def expected(ceilings: Ceilings) -> CostModel:
    """The predictions, of 2026-11-22: from compiled kernels and counts of launches, before any ran on a card.

    Llama-3.1-8B at 256 rows and 800 keys: products 6.7 ms where 4.9 are the least, attention 8.3 where 6.2 are, 1.2 ms
    for the rest. Prefill: `wgmma` without TMA, one program to a multiprocessor, 375 of 790 TFLOP/s. Keys of fp8: 1,100
    instructions a warp and tile beside 880 cycles of memory's time. A row that isn't split: 8 ms for 256 tiles of
    32 layers. Top-p of 256 rows of 128,256 logits: 4 ms. A layer launched by itself: 200 us of the host.
    """
    return CostModel(
        ceilings,
        products=0.73,
        decode_attention=0.75,
        scaled_decode_attention=0.6,
        prefill_attention=0.47,
        rows=0.75,
        series_tile_s=8e-3 / (256 * 32),
        filtered_logit_s=4e-3 / (256 * 128_256),
        replayed_layer_s=1.2e-3 / 32,
        launched_layer_s=200e-6,
    )


def visible_keys(rows: Sequence[tuple[int, int]]) -> int:
    """Pairs of a query and a key that a causal mask lets through."""
    return sum(
        query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2 for query_len, seq_len in rows
    )


@dataclass(slots=True)
class _Running:
    computed: int
    prompt: int
    wanted: int
    """Tokens that it will have computed when it ends: the last output is never fed back."""


def schedule(
    requests: Sequence[tuple[int, int]], *, most_rows: int, token_budget: int, cached: int = 0
) -> Iterator[Step]:
    """The steps of a continuously batched engine that is given all requests at once.

    Args:
        requests: (prompt length, output length) of each, in order.
        cached: tokens at the beginning of all prompts that are in the cache already.
    """
    waiting = deque(
        _Running(min(cached, prompt - 1), prompt, prompt + output - 1) for prompt, output in requests
    )
    running: list[_Running] = []
    while waiting or running:
        rows: list[tuple[int, int]] = []
        budget = token_budget
        while waiting and len(running) < most_rows:
            running.append(waiting.popleft())
        for row in running:  # those that decode came first, and stand first
            count = min(budget, max(1, row.prompt - row.computed))
            if count:
                row.computed += count
                budget -= count
                rows.append((count, row.computed))
        running = [row for row in running if row.computed < row.wanted]
        yield Step(rows, cached)
