"""An MoE model with random weights: Pagemill, transformers' `generate` and vLLM, fp32, in one run.

    python -m benchmarks.decoding.experts [--layers 12] [--experts 64] [--rows 1 8 32] [--rounds 3]

Every row has an 8-token prompt and 64 output tokens; `prompt` is requests of 512 tokens with one output
token. Engines run alternately as in `benchmarks.throughput`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import report
from benchmarks.decoding.rows import Rows, measure
from benchmarks.engines.contenders import (
    CONTENDERS,
    REFERENCE,
    SUBJECT,
    WITHOUT_DRAFTS,
    Contender,
    having_peers,
)

VOCAB_SIZE = 32_000


def contenders(rows: int) -> list[Contender]:
    """Return the contenders; transformers runs all rows in one batch."""
    options: dict[str, tuple[tuple[str, Any], ...]] = {
        SUBJECT: (("dtype", "float32"), ("enable_prefix_caching", False), *WITHOUT_DRAFTS),
        "vllm": (),
        REFERENCE: (("batch_size", rows),),
    }
    chosen = [each for each in CONTENDERS if each.name in options]
    return having_peers([replace(each, options=options[each.name], every_round=True) for each in chosen])


def write_model(folder: Path, options: argparse.Namespace) -> int:
    """Write a Qwen3-MoE with fp32 weights; return its number of parameters."""
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
    parser = report.parser(__doc__, model=False)
    sizes = {"layers": 12, "experts": 64, "hidden": 1024, "inner": 384, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    given, console = parser.parse_args(), report.console()
    file = report.Report("experts", "tokens per second of a random Qwen3-MoE, greedy, fp32", given)
    with tempfile.TemporaryDirectory(prefix="pagemill-experts-") as folder:
        parameters = write_model(Path(folder), given)
        console.print(f"{parameters / 1e6:.0f} million parameters")
        rows = Rows(given.rows, 8, 64, VOCAB_SIZE)
        figures = measure(rows, folder, contenders(max(given.rows)), given.rounds, console)
    file.write({"parameters": parameters} | figures)
    console.print(f"written to {file.path}")
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
