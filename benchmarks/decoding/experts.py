"""A mixture of experts with random weights: this engine beside transformers' own `generate` and vLLM, fp32, in one run.

    python -m benchmarks.decoding.experts [--layers 12] [--experts 64] [--rows 1 8 32] [--rounds 3]

Every row brings 8 tokens and gets 64; `prompt` is requests of 512 tokens that get one. Engines take turns as in
`benchmarks.throughput`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import machine
from benchmarks.decoding.rows import Rows, measure
from benchmarks.engines import peers
from benchmarks.engines.contenders import REFERENCE, SUBJECT, WITHOUT_DRAFTS, Contender
from benchmarks.report import result_path, write

VOCAB_SIZE = 32_000
VLLM = Contender("vllm", "benchmarks.engines.vllm", "vLLM's CPU build, offline", peers.VLLM)


def contenders(rows: int) -> list[Contender]:
    """Return who takes part; transformers gets all rows in one batch."""
    ours = Contender(
        SUBJECT,
        "benchmarks.engines.pagemill",
        "this engine, offline",
        options=(("dtype", "float32"), ("enable_prefix_caching", False), *WITHOUT_DRAFTS),
    )
    theirs = Contender(
        REFERENCE,
        "benchmarks.engines.static_batches",
        "generate(), one batch",
        options=(("batch_size", rows),),
    )
    if peers.VLLM.python() is None:
        print("vllm: no environment for it; see python -m benchmarks --install-peers", file=sys.stderr)
        return [ours, theirs]
    return [ours, theirs, VLLM]


def write_model(folder: Path, options: argparse.Namespace) -> int:
    """Write a Qwen3-MoE of fp32 numbers; returns its parameters."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=options.inner * 8,
        moe_intermediate_size=options.inner,
        num_experts=options.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    count = int(sum(parameter.numel() for parameter in model.parameters()))
    del model
    gc.collect()
    return count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    started, where = datetime.now(UTC), machine.describe()
    with tempfile.TemporaryDirectory(prefix="pagemill-experts-") as folder:
        parameters = write_model(Path(folder), given)
        console.print(f"{parameters / 1e6:.0f} million parameters")
        rows = Rows(given.rows, 8, 64, VOCAB_SIZE)
        figures = measure(rows, folder, contenders(max(given.rows)), given.rounds, console)
    path = given.out or result_path("experts", started)
    head = {
        "question": "tokens per second of a random Qwen3-MoE, greedy, fp32",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "parameters": parameters,
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
    }
    write(path, head | figures)
    console.print(f"written to {path}")
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
