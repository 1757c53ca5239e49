"""Settings of the interpreters of a worker and its engine."""

from __future__ import annotations

import gc
import os
import sys

SWITCH_S = 0.0001
"""The engine's thread releases the GIL for every kernel, a hundred times per step. It must not wait the
default 5 ms to get it back: a thread that writes checkpoints cost 1.4 % of short jobs' throughput."""

SPIN_COUNT = "5000"
"""How often an OpenMP thread polls for the next kernel before it sleeps, about 0.1 ms. GNU's runtime polls
300,000 times and so keeps a core from the thread that prepares the next kernel: on two busy cores, a token
took three to eight times the CPU time, and 16 streams had a sixth of the tokens per second."""


def spin_briefly() -> None:
    """Make kernels' threads poll by `SPIN_COUNT`, unless the environment sets it. Call it before torch is imported."""
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def prepare_for_steps() -> None:
    """Configure this process for steps, after the model is loaded."""
    _freeze_heap()
    sys.setswitchinterval(SWITCH_S)


def stay_without_torch() -> None:
    """Keep torch out of this process, whose engine is in another.

    transformers, which reads the tokenizer, imports torch if it is installed: 4 s and 300 MB without use.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # documented: an import of it fails
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _freeze_heap() -> None:
    """Exclude the model's libraries from garbage collection: traversing half a million permanent objects
    pauses a step for up to half a second.
    """
    gc.collect()
    gc.freeze()
