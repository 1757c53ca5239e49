"""FlashAttention 3: the mapping of arguments to the op's, with a replacement of the same schema. No kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.kernels import reference
from pagemill.kernels.gpu import flash_attention
from pagemill.kernels.gpu.attention import LIBRARIES, paged_attention
from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.gpu.flash_attention import FlashAttention3
from tests.kernels import fa3_op
from tests.kernels.paged_case import TOLERANCE, PagedCase, assert_close, make_case

_HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
_MIXED = ([1, 1, 5, 20], [33, 1, 40, 20])


@pytest.fixture(autouse=True)
def stand_in() -> None:
    fa3_op.register()
    fa3_op.calls.clear()


def _case(query_lens: list[int], seq_lens: list[int], **options: Any) -> PagedCase:
    case = make_case(query_lens, seq_lens, **{"dtype": torch.bfloat16} | _HEADS | options)
    return replace(case, cache=replace(case.cache, attention="fa3"))


def _run(case: PagedCase) -> dict[str, Any]:
    """Compare with the reference in fp64; return the arguments of the call."""
    out = paged_attention(case.query, case.cache, case.metadata, case.scoring)
    double = case.in_double()
    truth = reference.paged_attention(double.query, double.cache, double.metadata, double.scoring)
    assert out.dtype == case.query.dtype
    assert out.is_contiguous()
    assert_close(out, truth, case, TOLERANCE[case.query.dtype])
    (call,) = fa3_op.calls
    return call


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_decode_rows_and_prompts_are_one_call(dtype: torch.dtype, block_size: int) -> None:
    call = _run(_case(*_MIXED, dtype=dtype, block_size=block_size))
    assert call["num_splits"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 7},
        {"sliding_window": 1},
        {"softcap": 2.0},
        {"sinks": True},
        {"sinks": True, "sliding_window": 9, "softcap": 3.0},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 256},
        {"padded_decode_rows": 3, "padded_tokens": 5},
    ],
    ids=str,
)
def test_scorings_and_shapes(options: dict[str, Any]) -> None:
    _run(_case(*_MIXED, **options))


def test_the_cache_is_a_view_and_not_a_copy() -> None:
    case = _case(*_MIXED)
    call = _run(case)
    assert call["k"].data_ptr() == case.cache.keys.data_ptr()
    assert call["v"].data_ptr() == case.cache.values.data_ptr()


def test_a_captured_step_passes_no_number_of_the_step() -> None:
    """Between replays only contents of tensors change: bounds and splits are those of the capture."""
    calls = []
    for lengths in ([3, 3, 90], [40, 1, 2]):
        case = _case([1, 1, 1], lengths)
        case.metadata.max_seq_len = 128  # as in a capture
        calls.append(_run(case))
        fa3_op.calls.clear()
    first, second = (
        {name: value for name, value in call.items() if not isinstance(value, torch.Tensor)} for call in calls
    )
    assert first == second
    assert first["num_splits"] > 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"cache_dtype": torch.int8}, "int8"),
        ({"alibi": True}, "ALiBi"),
        ({"sliding_window": -8}, "chunked"),
        ({"head_dim": 264}, "head_dim of 264"),
        ({"head_dim": 68}, "head_dim of 68"),
        ({"block_size": 128}, "block_size of 128"),
        ({"num_heads": 66, "sinks": True}, "sinks of 66 heads"),
    ],
    ids=str,
)
def test_layers_that_the_op_does_not_compute(options: dict[str, Any], reason: str) -> None:
    case = _case([1], [9], **options)
    assert reason in str(FlashAttention3().unsupported(case.query, case.cache, case.scoring))


def test_layers_left_to_the_kernels_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pagemill.kernels.gpu import attention

    attention._warn.cache_clear()
    monkeypatch.setattr(attention, "_by_kernels", lambda query, *_: query)
    case = _case([1], [9], alibi=True)
    for _ in range(2):
        assert paged_attention(case.query, case.cache, case.metadata, case.scoring) is case.query
    assert [record.getMessage() for record in caplog.records] == [
        "attention backend fa3 does not support ALiBi; Triton computes these layers"
    ]
    assert not fa3_op.calls


def test_without_the_library_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "NAMESPACE", "_no_such_library")
    with pytest.raises(Unavailable, match=r"pip install --no-deps vllm==0\.23\.0"):
        FlashAttention3().require(torch.device("cpu"))


def test_a_library_of_another_torch_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not a library")
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('is imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_attention, "NAMESPACE", "_no_such_library")
    with pytest.raises(Unavailable, match="was not built for torch"):
        FlashAttention3().require(torch.device("cpu"))


def test_another_gpu_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(Unavailable, match=r"9\.x.*this one has 8\.0"):
        FlashAttention3().require(torch.device("cuda"))


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        (fa3_op.SCHEMA.replace("Tensor? page_table, ", ""), "page_table"),
        (fa3_op.SCHEMA.replace("int sm_margin", "int sm_margin, int new_number"), "new_number"),
    ],
)
def test_an_unknown_schema_is_unavailable(monkeypatch: pytest.MonkeyPatch, schema: str, name: str) -> None:
    namespace = f"pagemill_test_{name}"
    library = torch.library.Library(namespace, "DEF")
    library.define(schema)
    monkeypatch.setattr(flash_attention, "NAMESPACE", namespace)
    with pytest.raises(Unavailable, match=name):
        FlashAttention3().require(torch.device("cpu"))


def test_an_older_schema_without_unused_arguments_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("pagemill_test_older", "DEF")
    library.define(
        fa3_op.SCHEMA.replace(", int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k", ", int? more=7")
    )
    monkeypatch.setattr(flash_attention, "NAMESPACE", "pagemill_test_older")
    backend = FlashAttention3()
    backend.require(torch.device("cpu"))
    assert backend._unused["more"] == 7


def test_the_setting_offers_every_library() -> None:
    choices = get_args(get_type_hints(EngineConfig)["attention_backend"])
    assert set(choices) == {"auto", "triton", *LIBRARIES}
