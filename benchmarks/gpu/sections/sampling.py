"""Drawing tokens for the rows of a step, with and without filters; beside it the sort that it does without."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.row_kernels import LLAMA_SIZES, TOY_SIZES, sampling_rows
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels import dispatch

# More than one set of logits at 256 rows is over twice the L2 cache; at 16 rows they would stay in it.
_ROWS = (256, 64)


def run(bench: Bench) -> Iterator[Row]:
    vocab_size = (TOY_SIZES if bench.is_tiny else LLAMA_SIZES).vocab_size
    for num_rows in (3,) if bench.is_tiny else _ROWS:
        logits = 3 * torch.randn(num_rows, vocab_size, device=bench.device)
        peaks = logits.amax(dim=-1)
        floor = bench.floor.seconds(logits.nbytes)
        for has_filters in (False, True):
            rows = sampling_rows(bench.device, num_rows, filters=has_filters)

            def draw(rows=rows, has_filters=has_filters, logits=logits, peaks=peaks):  # type: ignore[no-untyped-def]
                return dispatch.sample_tokens(logits, peaks, rows, has_filters=has_filters)

            with dispatch.override(bench.face):
                seconds = bench.measure(draw)
            cuts = bench.expected.filtered_logit_s * logits.numel() if has_filters else 0.0
            yield Row(
                case=f"{num_rows} rows, {'top-k, top-p, min-p' if has_filters else 'temperature alone'}",
                measured=seconds,
                floor=floor,
                prediction=bench.expected.seconds(logits.nbytes, share=bench.expected.rows) + cuts,
                facts={"gb_per_s": round(logits.nbytes / seconds / 1e9, 1)},
            )
        seconds = bench.measure(lambda logits=logits: logits.sort(dim=-1))  # type: ignore[misc]
        yield Row(case=f"{num_rows} rows, torch's sort", measured=seconds, floor=floor)
