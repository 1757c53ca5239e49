"""Layers in groups: by window, of nearly equal size, few."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.layers.kv_cache_shape import KVCacheShape, layer_groups

LONG = 10**6
GEMMA_3_27B = ((1024,) * 5 + (None,)) * 10 + (1024, 1024)


def sizes(windows: tuple[int | None, ...], max_model_len: int = LONG) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in layer_groups(windows, max_model_len)]


def test_published_models() -> None:
    assert sizes((None,) * 32) == [(None, 32)]
    assert sizes((4096,) * 32) == [(4096, 32)]
    assert sizes((4096, None) * 21) == [(4096, 21), (None, 21)]
    assert sizes((None, 32768, 32768, 32768) * 9) == [(None, 9)] + [(32768, 9)] * 3
    assert sizes(GEMMA_3_27B) == [(1024, 11)] * 4 + [(1024, 8), (None, 10)]


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert sizes((4096, None) * 21, 4096) == [(None, 42)]
    assert sizes((4096, 512, None), 4096) == [(None, 1), (None, 1), (512, 1)]


@given(st.lists(st.sampled_from([None, 6, 9, 20]), min_size=1, max_size=70), st.integers(5, 30))
def test_every_layer_is_in_one_group_of_its_window(windows: list[int | None], max_model_len: int) -> None:
    groups = layer_groups(windows, max_model_len)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        for layer in group.layers:
            own = windows[layer]
            assert group.window == (None if own is None or own >= max_model_len else own)
    assert 1 <= len(groups) <= 8
    assert len({group.window for group in groups}) > 1 or len(groups) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_block_has_the_bytes_of_one_groups_layers(dtype: torch.dtype) -> None:
    one = KVCacheShape(42, 8, 64, 16, dtype)
    two = KVCacheShape(42, 8, 64, 16, dtype, layer_groups((4096, None) * 21, LONG))
    assert (one.windows, two.windows) == ((None,), (4096, None))
    assert two.block_bytes * 2 == one.block_bytes
