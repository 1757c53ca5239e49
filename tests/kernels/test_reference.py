"""The reference operators against the textbook formula, in fp64."""

from __future__ import annotations

import random

import pytest
import torch

from pagemill.kernels import reference
from pagemill.kernels.types.layer_cache import LayerCache
from tests.kernels.paged_case import TOLERANCE, assert_close, dense_attention, make_case


def _random_case_arguments(seed: int) -> dict[str, object]:
    pick = random.Random(seed)
    decodes, prefills = pick.randint(0, 4), pick.randint(0, 3)
    if decodes + prefills == 0:
        prefills = 1
    query_lens = [1] * decodes + [pick.randint(2, 40) for _ in range(prefills)]
    window = pick.choice([None, None, 1, 5, 30, -1, -7, -30])
    return {
        "query_lens": query_lens,
        "seq_lens": [query_len + pick.choice([0, 0, 1, 15, 16, 17, 50]) for query_len in query_lens],
        "num_kv_heads": (num_kv_heads := pick.choice([1, 2, 3])),
        "num_heads": num_kv_heads * pick.choice([1, 3, 7]),
        "head_dim": pick.choice([8, 20, 64]),
        "block_size": pick.choice([8, 16, 32, 128]),
        "alibi": pick.random() < 0.3,
        "softcap": pick.choice([None, None, 2.0]),
        "sliding_window": window,
        "free_outside_window": window is not None and pick.random() < 0.5,
        "padded_decode_rows": pick.choice([0, 2]),
        "padded_tokens": pick.choice([0, 3]),
        "dtype": torch.float64,
        "sinks": pick.random() < 0.3,
        "seed": seed,
    }


@pytest.mark.parametrize("seed", range(40))
def test_attention_equals_textbook(seed: int) -> None:
    case = make_case(**_random_case_arguments(seed))  # type: ignore[arg-type]
    out = reference.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert_close(out, dense_attention(case), case, TOLERANCE[torch.float64])


def test_attention_computes_in_fp32_for_half_inputs() -> None:
    case = make_case([1, 9], [70, 40], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    out = reference.paged_attention(case.query, case.cache, case.metadata, case.scoring)
    assert out.dtype == torch.bfloat16
    exact = dense_attention(case.in_double())
    # Exactly one rounding of the result: half a unit in the last place of a value below 2.
    assert_close(out, exact, case, 2.0**-8)


@pytest.mark.parametrize("block_size", [1, 16])
def test_reshape_and_cache_writes_its_slots_and_no_others(block_size: int) -> None:
    packed = torch.randn(5, 3, 2, 8)  # a view into packed projections: only the last dimension is contiguous
    key, value = packed[:, 1], packed[:, 2]
    key_cache = torch.full((6, 2, block_size, 8), float("nan"))
    value_cache = key_cache.clone()
    slots = [4 * block_size, 1, -1, 0, 6 * block_size - 1]
    reference.reshape_and_cache(key, value, LayerCache(key_cache, value_cache), torch.tensor(slots))

    for cache, tokens in ((key_cache, key), (value_cache, value)):
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(by_slot[slot], tokens[token])
        untouched = [slot for slot in range(len(by_slot)) if slot not in slots]
        assert by_slot[untouched].isnan().all()


def test_copy_blocks_copies_whole_blocks() -> None:
    key_cache, value_cache = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 4, 8)
    old_keys, old_values = key_cache.clone(), value_cache.clone()
    reference.copy_blocks(key_cache, value_cache, [(0, 5), (0, 1), (3, 2)])
    for new, old in ((key_cache, old_keys), (value_cache, old_values)):
        assert torch.equal(new, old[[0, 0, 3, 3, 4, 0]])
    reference.copy_blocks(key_cache, value_cache, [])
