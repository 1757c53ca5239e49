"""A GPU is lent by the minute: the sections of `benchmarks.gpu` are walked through here first, on toy sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import attention
from benchmarks.gpu.attention import Shape
from pagemill.kernels.gpu.tuning import Tile

_CPU = torch.device("cpu")
_TINY = Shape("tiny", 2, 1, 64)


def _call_once(run: Callable[[], object]) -> float:
    run()
    return 1e-3


def test_correctness_reports_every_case() -> None:
    cases = [(([1, 3], [20, 9]), _TINY, {}), (([4], [40]), _TINY, {"sliding_window": 8})]
    rows = list(attention.correctness(_CPU, cases, [torch.float32]))
    assert [row["ok"] for row in rows] == [True, True]


def test_correctness_reports_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.TOLERANCE, torch.float32, 0.0)
    rows = list(attention.correctness(_CPU, [(([1], [20]), _TINY, {})], [torch.float32]))
    assert rows[0]["ok"] is False


def test_decode_counts_bytes() -> None:
    sizes: dict[str, Any] = {"shapes": [_TINY], "batch_sizes": [2], "kv_lens": [32], "block_sizes": [16]}
    rows = list(attention.decode(_CPU, _call_once, 1.0, **sizes, bytes_per_call=2**15))
    # 2 tensors of 2 rows, 32 keys, 1 head, 64 dims at 2 bytes are 16 KB a layer; two layers ran in 1 ms.
    assert rows[0]["microseconds"] == 500.0
    assert rows[0]["of_copy"] == "3%"


def test_prefill_counts_visible_keys() -> None:
    batches = [([16], [16]), ([4], [20])]
    rows = list(attention.prefill(_CPU, _call_once, None, shapes=[_TINY], batches=batches))
    assert [row["torch_tflop_per_s"] is None for row in rows] == [False, True]
    assert attention._prefill_operations(_TINY, [4], [20]) == 4 * (17 + 18 + 19 + 20) * 2 * 64


def _tiles(measure: Callable[[Callable[[], object]], float]) -> list[dict[str, Any]]:
    candidates = [Tile(16, 32, 4, 1), Tile(16, 64, 4, 1)]
    sizes: dict[str, Any] = {"shape": _TINY, "decodes": [(1, 40)], "prefill_len": 24}
    return list(attention.tiles(_CPU, measure, decode_tiles=candidates, prefill_tiles=candidates, **sizes))


def test_tiles_runs_every_candidate() -> None:
    rows = _tiles(_call_once)
    assert [row["microseconds"] for row in rows] == [250.0, 250.0, 1000.0, 1000.0]  # four layers of decode


def test_a_tile_that_has_no_room_does_not_end_the_others() -> None:
    calls = 0

    def refuse_the_second(run: Callable[[], object]) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return _call_once(run)

    rows = _tiles(refuse_the_second)
    assert [row["microseconds"] is None for row in rows] == [False, True, False, False]
    assert "shared memory" in rows[1]["why"]
