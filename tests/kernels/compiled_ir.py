"""Executes the kernels' compiled Triton IR for sm_90, in bf16, and compares the results with fp64.

Neither the interpreter, which runs a kernel's Python, nor a compilation without a GPU does this. ttsem also
reports races between programs, accesses out of bounds, and reads of uninitialized memory. It is a separate
program, for another Triton version than the tests':

    make compiled-ir
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import attention, row_kernels
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row, Scale
from pagemill.kernels import dispatch, reference
from pagemill.kernels.dispatch import FaceName
from pagemill.kernels.gpu import attention_prefill, copy_blocks, scaled_matmul
from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.gpu.tuning import Splits
from pagemill.kernels.types.layer_cache import FP8
from tests.kernels.paged_case import TOLERANCE, assert_close, make_case

_SHAPE = Shape("8 heads of 64", 8, 2, 64)
_LENGTHS = ([1, 1, 40], [90, 33, 120])
_OPTIONS: list[dict[str, Any]] = [
    {}, {"cache_dtype": FP8}, {"cache_dtype": torch.int8}, {"sinks": True}, {"softcap": 2.0}, {"alibi": True},
    {"sliding_window": 40, "free_outside_window": True}, {"sliding_window": -64},
    {"padded_decode_rows": 2, "padded_tokens": 3},
]  # fmt: skip
_CASES: list[Any] = [
    *((_LENGTHS, _SHAPE, options) for options in _OPTIONS),
    (_LENGTHS, Shape("6 heads of 80", 6, 2, 80), {"block_size": 24}),
    (_LENGTHS, Shape("4 heads of 128", 4, 1, 128), {}),
]
_SIZES = row_kernels.Sizes(20, 256, 96, 700, Shape("4 heads of 64", 4, 2, 64), 3)
_SPLITS = (Splits(4, 128), Splits(16, 64))


@dataclass(frozen=True)
class CompiledBench(Bench):
    @property
    def face(self) -> FaceName:
        return "triton"


def rows(bench: Bench) -> Iterator[Row]:
    yield from attention.correctness(bench, _CASES, [torch.bfloat16])
    yield from row_kernels.correctness(bench, _SIZES, [torch.bfloat16])


def splits() -> Iterator[tuple[str, str | None]]:
    """Rows split into parts, and rows of one part."""
    for options in ({}, {"sinks": True}, {"sliding_window": 100}):
        for split in _SPLITS:
            sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
            case = make_case([1, 1, 1], [40, 128, 500], padded_decode_rows=1, **(sizes | options))  # type: ignore[arg-type]
            out, metadata = torch.full_like(case.query, float("nan")), case.metadata
            paged_attention_decode(
                out, case.query, case.cache, metadata.block_tables, metadata.seq_lens, case.scoring,
                max_seq_len=metadata.max_seq_len, splits=split,
            )  # fmt: skip
            double = case.in_double()
            truth = reference.paged_attention(double.query, double.cache, double.metadata, double.scoring)
            try:
                assert_close(out, truth, case, TOLERANCE[torch.bfloat16])
                yield f"decode in parts {split} {options}", None
            except AssertionError as error:
                yield f"decode in parts {split} {options}", str(error)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A CPU has a separate implementation of this matmul; here the kernel is tested. Matrices of adapters are
    # read by address, which ttsem does not support.
    scaled_matmul.library_takes = lambda *_: False  # type: ignore[assignment]
    for module in (attention_prefill, copy_blocks):
        module.to_device = lambda array, _: torch.from_numpy(array)  # type: ignore[attr-defined]  # nothing can be pinned
    dispatch._load("triton").pop("add_low_rank")
    failed = False
    for row in rows(CompiledBench(Scale.TINY, torch.device("cpu"), lambda run: 0.0)):
        failed |= row.ok is False
        print(f"{'WRONG' if row.ok is False else 'ok'}  {row.case}: {row.measured:.2g}", flush=True)  # noqa: T201
    for name, reason in splits():
        failed |= reason is not None
        print(f"{reason or 'ok'}  {name}", flush=True)  # noqa: T201
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
