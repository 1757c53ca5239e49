"""Settings of the interpreters of a worker and its engine."""

from __future__ import annotations

import gc
import os
import sys

SWITCH_S = 0.0001
"""The engine's thread releases the GIL for every kernel, a hundred times a step, and must not wait the usual
5 ms to get it back from another thread: one that writes checkpoints cost 1.4 % of short jobs' throughput."""

SPIN_COUNT = "5000"
"""Turns that an OpenMP thread waits for the next kernel before it sleeps, some 0.1 ms. GNU's runtime takes 300,000,
in which it keeps a core from the thread that the next kernel waits for: on two cores in use by others, a token took
three to eight times the processor time, and 16 streams had a sixth of the tokens a second."""


def spin_briefly() -> None:
    """Have kernels' threads wait by `SPIN_COUNT`, unless the environment says how; before torch is imported."""
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def prepare_for_steps() -> None:
    """Set up this process for steps, once the model is loaded."""
    _freeze_heap()
    sys.setswitchinterval(SWITCH_S)


def stay_without_torch() -> None:
    """Keep torch out of this process, whose engine is in another.

    transformers, which reads the tokenizer, imports torch if it finds it: 4 s and 300 MB for nothing.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # documented: an import of it fails
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _freeze_heap() -> None:
    """Exclude the model's libraries from garbage collection: half a million permanent objects, whose
    traversal pauses a step for up to half a second.
    """
    gc.collect()
    gc.freeze()
