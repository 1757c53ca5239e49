"""Every supported decoder type: tiny random models on this device, compared with transformers on the CPU."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.section import Bench, Row
from benchmarks.gpu.sections.correctness import Job, num_processes, run_jobs

_DRY = ("llama",)


def run(bench: Bench) -> Iterator[Row]:
    """One row per type, in order of completion. A type that the installed transformers lacks is omitted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.engine.models.generic.sweep import stored_outcomes

    exact = [kind for kind, outcome in stored_outcomes()[1].items() if outcome.refusal is None]
    kinds = _DRY if bench.is_tiny else [kind for kind in exact if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    yield from run_jobs([Job(kind, _try, (kind,)) for kind in kinds], 1 if bench.is_tiny else num_processes())


def _try(kind: str) -> list[Row]:
    from tests.engine.models.generic.trial import try_type

    warnings = _Warnings()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, warnings:
        refusal = try_type(kind, Path(directory), variants=(0,)).refusal
    facts = {"refused": refusal, "warnings": sorted(warnings.messages)}
    seconds = time.perf_counter() - started
    return [Row(case=kind, measured=seconds, ok=True, facts={name: it for name, it in facts.items() if it})]


class _Warnings(logging.Handler):
    """The engine's warnings inside the block, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.add(record.getMessage()[:200])

    def __enter__(self) -> None:
        logging.getLogger("pagemill").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("pagemill").removeHandler(self)
