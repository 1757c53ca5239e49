"""FlashInfer: the mapping of arguments to its interface, with a replacement. No kernel of it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagemill.kernels import reference
from pagemill.kernels.gpu import flashinfer
from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.gpu.flashinfer import FlashInfer
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.scoring import Scoring
from tests.kernels import flashinfer_module
from tests.kernels.paged_case import TOLERANCE, PagedCase, assert_close, make_case

_HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
_MIXED = ([1, 1, 5, 20, 7], [33, 1, 40, 20, 16])
_PROMPTS = ([5, 20, 7], [40, 20, 16])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, and the decode kernel by its definition: no GPU runs."""
    flashinfer_module.install(monkeypatch, flashinfer.MODULE)

    def decode(
        out: torch.Tensor, query: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor,
        seq_lens: torch.Tensor, scoring: Scoring, *, max_seq_len: int,
    ) -> None:  # fmt: skip
        lens = seq_lens.tolist()
        case = make_case([1] * len(lens), lens, **{"dtype": query.dtype} | _HEADS)
        step = replace(case.metadata, block_tables=block_tables, seq_lens=seq_lens)
        out.copy_(reference.paged_attention(query, cache, step, scoring))

    monkeypatch.setattr(flashinfer, "paged_attention_decode", decode)


def _case(query_lens: list[int], seq_lens: list[int], **options: Any) -> PagedCase:
    return make_case(query_lens, seq_lens, **{"dtype": torch.bfloat16} | _HEADS | options)


def _check(backend: FlashInfer, case: PagedCase) -> None:
    """Compare with the reference in fp64."""
    out = backend.attend(case.query, case.cache, case.metadata, case.scoring)
    double = case.in_double()
    truth = reference.paged_attention(double.query, double.cache, double.metadata, double.scoring)
    assert out.dtype == case.query.dtype
    assert_close(out, truth, case, TOLERANCE[case.query.dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
@pytest.mark.parametrize("lengths", [_MIXED, _PROMPTS, ([3], [3])], ids=["mixed", "prompts", "one prompt"])
def test_steps(lengths: tuple[list[int], list[int]], dtype: torch.dtype, block_size: int) -> None:
    _check(FlashInfer(), _case(*lengths, dtype=dtype, block_size=block_size))
    assert flashinfer_module.calls == ["plan", "run"]


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 7},
        {"sliding_window": 1},
        {"softcap": 2.0},
        {"softcap": 2.0, "sliding_window": 9},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 128},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 256},
        {"padded_tokens": 5},
    ],
    ids=str,
)
def test_scorings_and_shapes(options: dict[str, Any]) -> None:
    _check(FlashInfer(), _case(*_PROMPTS, **options))


def test_decode_rows_are_not_planned() -> None:
    _check(FlashInfer(), _case([1, 1, 1], [3, 3, 90], padded_decode_rows=2))
    assert flashinfer_module.calls == []


def test_the_layers_of_a_step_share_a_plan() -> None:
    backend, case = FlashInfer(), _case(*_PROMPTS)
    for _ in range(3):
        _check(backend, case)
    _check(backend, replace(case, scoring=replace(case.scoring, sliding_window=4)))
    _check(backend, case)
    assert flashinfer_module.calls == ["plan", "run", "run", "run", "plan", "run", "run"]


def test_a_plan_is_not_overwritten_by_the_next_steps() -> None:
    backend = FlashInfer()
    for seed in range(4):
        lengths = [seed + 1, 20, 7], [40 + seed, 20, 16]
        _check(backend, _case(*lengths))
    (planners,) = backend._planners.values()
    assert len({id(planner.wrapper) for planner in planners}) == 2
    newest, before = (planner.wrapper._given for planner in planners)
    assert (newest, before) == (flashinfer_module.plans[3], flashinfer_module.plans[2])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"cache_dtype": torch.int8}, "int8"),
        ({"alibi": True}, "ALiBi"),
        ({"sliding_window": -8}, "chunked"),
        ({"head_dim": 80}, "head_dim of 80"),
        ({"sinks": True}, "sinks"),
        ({}, None),
    ],
    ids=str,
)
def test_layers_that_it_does_not_compute(options: dict[str, Any], reason: str | None) -> None:
    case = _case([5], [9], **options)
    found = FlashInfer().unsupported(case.query, case.cache, case.scoring)
    assert found is None if reason is None else reason in str(found)


def test_without_the_library_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "MODULE", "no_such_library")
    with pytest.raises(Unavailable, match="pip install flashinfer-python"):
        FlashInfer().require(torch.device("cpu"))


def test_a_library_that_cannot_be_imported_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "broken_library").mkdir()
    (tmp_path / "broken_library" / "__init__.py").write_text("raise RuntimeError('no compiler')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flashinfer, "MODULE", "broken_library")
    with pytest.raises(Unavailable, match="cannot be loaded: RuntimeError: no compiler"):
        FlashInfer().require(torch.device("cpu"))


def test_another_interface_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashinfer_module.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setattr(wrapper, "plan", lambda self, qo_indptr, page_size: None)
    with pytest.raises(Unavailable, match="lacks causal, head_dim_qk"):
        FlashInfer().require(torch.device("cpu"))
