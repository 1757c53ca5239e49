"""A GPU is lent by the minute: the sections of `benchmarks.gpu` are walked through here first, on toy sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu_attention
from benchmarks.gpu_attention import Shape
from kernels.tuning import Tile

_CPU = torch.device("cpu")
_TINY = Shape("tiny", 2, 1, 64)


def _call_once(run: Callable[[], object]) -> float:
    run()
    return 1e-3


def test_correctness_reports_every_case() -> None:
    cases = [(([1, 3], [20, 9]), _TINY, {}), (([4], [40]), _TINY, {"sliding_window": 8})]
    rows = gpu_attention.correctness(_CPU, cases, [torch.float32])
    assert [row["ok"] for row in rows] == [True, True]


def test_correctness_reports_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_attention.TOLERANCE, torch.float32, 0.0)
    rows = gpu_attention.correctness(_CPU, [(([1], [20]), _TINY, {})], [torch.float32])
    assert rows[0]["ok"] is False


def test_decode_counts_bytes() -> None:
    rows = gpu_attention.decode(
        _CPU,
        _call_once,
        1.0,
        shapes=[_TINY],
        batch_sizes=[2],
        kv_lens=[32],
        block_sizes=[16],
        bytes_per_call=2**15,
    )
    # 2 tensors of 2 rows, 32 keys, 1 head, 64 dims at 2 bytes are 16 KB a layer; two layers ran in 1 ms.
    assert rows[0]["microseconds"] == 500.0
    assert rows[0]["of_copy"] == "3%"


def test_prefill_counts_visible_keys() -> None:
    batches = [([16], [16]), ([4], [20])]
    rows = gpu_attention.prefill(_CPU, _call_once, None, shapes=[_TINY], batches=batches)
    assert [row["torch_tflop_per_s"] is None for row in rows] == [False, True]
    assert gpu_attention._prefill_operations(_TINY, [4], [20]) == 4 * (17 + 18 + 19 + 20) * 2 * 64


def test_tiles_runs_every_candidate() -> None:
    candidates = [Tile(16, 32, 4, 1), Tile(16, 64, 4, 1)]
    rows = gpu_attention.tiles(
        _CPU,
        _call_once,
        shape=_TINY,
        decodes=[(1, 40)],
        prefill_len=24,
        decode_tiles=candidates,
        prefill_tiles=candidates,
    )
    assert len(rows) == 4
