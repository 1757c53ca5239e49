"""The contenders of a table: Pagemill's engine, plain transformers, and the peers installed here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import peers

SUBJECT = "pagemill"
BF16_SUBJECT = "pagemill-bf16"
INT8_SUBJECT = "pagemill-int8"
REFERENCE = "transformers"
WITHOUT_DRAFTS = (("num_speculative_tokens", 0),)
"""Random prompts lead to repetitive outputs, which drafts predict well; peers do not use drafts by default."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    module: str
    description: str
    peer: peers.Peer | None = None
    """The peer whose environment it runs in; None: this one."""
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Options of Pagemill's engine for this contender."""
    every_round: bool = True
    """False: only the first and the last round, for contenders that are ten times as slow as the others."""


_OURS, _VLLM, _OPENVINO = (f"benchmarks.engines.{name}" for name in ("pagemill", "vllm", "openvino"))
_BF16 = ("PAGEMILL_BENCH_VLLM_DTYPE", "bfloat16")
_INT8 = ("PAGEMILL_BENCH_OPENVINO_WEIGHTS", "int8")
# OpenVINO's defaults also store the KV cache in 8 bits.
_OUR_INT8 = (("quantization", "int8"), ("kv_cache_dtype", "int8"), *WITHOUT_DRAFTS)

CONTENDERS = (
    Contender(SUBJECT, _OURS, "this engine, offline", options=WITHOUT_DRAFTS),
    Contender(
        BF16_SUBJECT, _OURS, "this engine, bfloat16 products and KV cache",
        options=(("dtype", "bfloat16"), *WITHOUT_DRAFTS),
    ),
    Contender("vllm", _VLLM, "vLLM's CPU build, offline", peers.VLLM),
    Contender("vllm-bf16", _VLLM, "vLLM's CPU build, bfloat16", peers.VLLM, (_BF16,)),
    Contender("openvino", _OPENVINO, "OpenVINO GenAI, fp32", peers.OPENVINO),
    Contender(INT8_SUBJECT, _OURS, "this engine, int8 weights, activations and KV cache", options=_OUR_INT8),
    Contender("openvino-int8", _OPENVINO, "OpenVINO GenAI, int8 weights and KV cache", peers.OPENVINO, (_INT8,)),
    Contender(
        REFERENCE, "benchmarks.engines.static_batches", "generate(), static FIFO batches of 16", every_round=False
    ),
)  # fmt: skip


def available_contenders(names: Sequence[str], among: Sequence[Contender] = CONTENDERS) -> list[Contender]:
    """Return the requested contenders that can run here; report on stderr which are missing and how to install them."""
    return having_peers([contender for contender in among if contender.name in names])


def having_peers(chosen: Sequence[Contender]) -> list[Contender]:
    """Omit contenders whose environment is missing, and report this on stderr."""
    missing = {peer for peer in (each.peer for each in chosen) if peer is not None and peer.python() is None}
    for peer in missing:
        print(
            f"{peer.name}: no environment for it; make one with: python -m benchmarks --install-peers",
            file=sys.stderr,
        )
    return [each for each in chosen if each.peer not in missing]
