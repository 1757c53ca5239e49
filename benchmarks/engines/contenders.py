"""The contenders of a table: our engine, plain transformers, and the peers that have an environment here."""

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
"""Random prompts lead to outputs that repeat themselves, which drafts guess; peers have none by default."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    module: str
    description: str
    peer: peers.Peer | None = None
    """Whose environment it runs in; None: ours."""
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Options of our engine that make this contender."""
    every_round: bool = True
    """False: the first and the last round only, for what takes ten times as long as the others."""


CONTENDERS = (
    Contender(SUBJECT, "benchmarks.engines.pagemill", "this engine, offline", options=WITHOUT_DRAFTS),
    Contender(
        BF16_SUBJECT,
        "benchmarks.engines.pagemill",
        "this engine, bfloat16 products and KV cache",
        options=(("dtype", "bfloat16"), *WITHOUT_DRAFTS),
    ),
    Contender("vllm", "benchmarks.engines.vllm", "vLLM's CPU build, offline", peers.VLLM),
    Contender(
        "vllm-bf16",
        "benchmarks.engines.vllm",
        "vLLM's CPU build, bfloat16",
        peers.VLLM,
        (("PAGEMILL_BENCH_VLLM_DTYPE", "bfloat16"),),
    ),
    Contender("openvino", "benchmarks.engines.openvino", "OpenVINO GenAI, fp32", peers.OPENVINO),
    Contender(
        INT8_SUBJECT,
        "benchmarks.engines.pagemill",
        "this engine, int8 weights, activations and KV cache",
        # OpenVINO's defaults keep the KV cache in 8 bits, too.
        options=(("quantization", "int8"), ("kv_cache_dtype", "int8"), *WITHOUT_DRAFTS),
    ),
    Contender(
        "openvino-int8",
        "benchmarks.engines.openvino",
        "OpenVINO GenAI, int8 weights and KV cache",
        peers.OPENVINO,
        (("PAGEMILL_BENCH_OPENVINO_WEIGHTS", "int8"),),
    ),
    Contender(
        REFERENCE,
        "benchmarks.engines.static_batches",
        "generate(), static FIFO batches of 16",
        every_round=False,
    ),
)


def available_contenders(names: Sequence[str]) -> list[Contender]:
    """The contenders asked for that can run here; says on stderr which one is missing and how to get it."""
    chosen = [contender for contender in CONTENDERS if contender.name in names]
    for peer in {contender.peer for contender in chosen if contender.peer is not None}:
        if peer.python() is None:
            print(
                f"{peer.name}: no environment for it; make one with: python -m benchmarks --install-peers",
                file=sys.stderr,
            )
            chosen = [contender for contender in chosen if contender.peer is not peer]
    return chosen
