from __future__ import annotations

import pytest

from benchmarks.roofs import Roofs, Sizes
from benchmarks.workloads import Workload

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip


def test_sizes_are_those_of_a_llama() -> None:
    sizes = Sizes.from_config(CONFIG)
    assert sizes.layer_weights == 2 * 64 * (64 + 32 + 32 + 64 + 3 * 128)
    assert (sizes.head_weights, sizes.attention_width, sizes.kv_numbers) == (64_000, 2 * 64, 2 * 2 * 32)


def test_a_roof_is_that_of_the_slower_of_memory_and_arithmetic() -> None:
    sizes = Sizes(layer_weights=1000, head_weights=0, attention_width=0, kv_numbers=0)
    workload = Workload("chat", [[1], [2]], [10, 10])
    # Two prompt tokens and twenty of output, 2,000 operations each; ten steps read 2,000 bytes each.
    slow_arithmetic = Roofs(bytes=1e12, operations={"bf16": 1000.0})
    assert slow_arithmetic.tokens_per_second(workload, sizes, "bf16") == pytest.approx(20 / 44)
    slow_memory = Roofs(bytes=1000.0, operations={"bf16": 1e12})
    assert slow_memory.tokens_per_second(workload, sizes, "bf16") == pytest.approx(1.0)


def test_a_prefix_that_all_prompts_share_is_computed_once() -> None:
    sizes = Sizes(layer_weights=1000, head_weights=0, attention_width=0, kv_numbers=0)
    roofs = Roofs(bytes=1e12, operations={"fp32": 1000.0})
    shared = Workload("label", [[7] * 50 + [number] for number in range(4)], [1] * 4)
    assert roofs.tokens_per_second(shared, sizes, "fp32") == pytest.approx(4 / (2 * (50 + 4) + 2 * 4))
