"""Tokens with overlap, graphs and one copy per step on and off, against transformers' own greedy choice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.exactness import differs_from_transformers, saved_model, tokens_of
from benchmarks.gpu.section import Bench, Row

_OFF = {"enforce_eager": True, "async_scheduling": False, "stage_inputs": False}


def run(bench: Bench) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = saved_model(directory)
        plain = tokens_of(bench, directory, **_OFF)
        yield _differing("all off, beside transformers", differs_from_transformers(bench, model, plain))
        model.to("cpu")
        for switch in _OFF:
            outputs = tokens_of(bench, directory, **(_OFF | {switch: not _OFF[switch]}))
            yield _differing(switch, _unequal(plain, outputs))
        yield _differing("as a user has them", _unequal(plain, tokens_of(bench, directory)))


def _differing(case: str, count: int) -> Row:
    return Row(case=case, measured=count, unit="requests", prediction=0, ok=count == 0)


def _unequal(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))
