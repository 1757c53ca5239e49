"""A cache of latents beside one of keys and values: memory per token, and processor time of a decode step.

`python -m benchmarks.kv.latents`. Bytes are those by which the engine sizes its pool, for the shapes of published
models; no clock is read for them. Steps are of a small dense model of random weights with the attention of
DeepSeek-V2-Lite, whose rows have 2048 tokens each: both engines run in one process and take turns, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import result_path, write
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.latent.shape import LatentShape
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
CONTEXT, STEPS = 2048, 24
LITE = LatentShape(num_heads=16, unrotated=128, rotated=64, value=128, rank=512)
MODELS = {
    "DeepSeek-V2-Lite": (27, LITE),
    "DeepSeek-V3": (61, LatentShape(num_heads=128, unrotated=128, rotated=64, value=128, rank=512)),
    "GLM-4.7-Flash": (47, LatentShape(num_heads=20, unrotated=192, rotated=64, value=256, rank=512)),
    "MiniCPM3-4B": (62, LatentShape(num_heads=40, unrotated=64, rotated=32, value=64, rank=256)),
}
_SMALL = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 4, "first_k_dense_replace": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64,
    "v_head_dim": 128, "q_lora_rank": None, "max_position_embeddings": 4096, "eos_token_id": 1, "bos_token_id": 0,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of a token in all layers."""

    model: str
    cache: str
    latents: int
    keys_and_values: int

    @property
    def times(self) -> float:
        return self.keys_and_values / self.latents


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians of the processor seconds of a decode step."""

    rows: int
    latents: float
    keys_and_values: float
    prompt_latents: float
    """Of the rows' prompts, once."""
    prompt_keys_and_values: float


def token_bytes(model: str, dtype: torch.dtype) -> Bytes:
    num_layers, latent = MODELS[model]
    shape = KVCacheShape(num_layers, 1, latent.cached, BLOCK_SIZE, dtype, latent=latent)
    expanded = shape.expanded_block_bytes
    assert expanded is not None
    cache = str(dtype).removeprefix("torch.")
    return Bytes(model, cache, shape.block_bytes // BLOCK_SIZE, expanded // BLOCK_SIZE)


class _Timed:
    """An engine whose rows' prompts are in the cache."""

    def __init__(self, directory: str, rows: int, context: int, *, has_latents: bool) -> None:
        with patch.object(CpuBackend, "caches_latents", has_latents):
            llm = LLM(
                directory, load_format="dummy", dtype="float32", num_threads=1, skip_tokenizer_init=True, verify=False,
                num_kv_blocks=2 + rows * (context // BLOCK_SIZE + 4), max_num_batched_tokens=512,
                num_speculative_tokens=0, block_size=BLOCK_SIZE, max_num_seqs=rows,
            )  # fmt: skip
        self._engine = llm.engine
        began = time.process_time()
        for row in range(rows):
            prompt = [(7 * row + 13 * i) % 4000 + 2 for i in range(context)]
            params = SamplingParams(temperature=0.0, max_tokens=STEPS + 8, ignore_eos=True)
            tokens, settings = self._engine.input_processor.process(prompt_token_ids=prompt, params=params)
            self._engine.add_request(str(row), tokens, settings)
        for _ in range(-(-rows * context // 512) + 1):
            self._engine.step()
        self.prompt_seconds = time.process_time() - began

    def step(self) -> float:
        began = time.process_time()
        self._engine.step()
        return time.process_time() - began


def step_time(rows: int, context: int = CONTEXT, steps: int = STEPS) -> StepTime:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(_SMALL))
        latent, expanded = (_Timed(directory, rows, context, has_latents=kind) for kind in (True, False))
        taken = [(latent.step(), expanded.step()) for _ in range(steps)]
    first, second = (statistics.median(times) for times in zip(*taken, strict=True))
    return StepTime(rows, first, second, latent.prompt_seconds, expanded.prompt_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = [token_bytes(model, dtype) for model in MODELS for dtype in (torch.bfloat16, torch.int8)]
    times = [step_time(rows) for rows in arguments.rows]
    console = Console()
    table = Table("model", "cache", "latents, bytes/token", "keys and values", "times")
    for size in sizes:
        table.add_row(
            size.model, size.cache, f"{size.latents:,}", f"{size.keys_and_values:,}", f"{size.times:.1f}"
        )
    console.print(table)
    table = Table("rows of 2048", "decode, latents", "keys and values", "prompts, latents", "keys and values")
    for taken in times:
        steps = (f"{seconds * 1e3:.1f} ms" for seconds in (taken.latents, taken.keys_and_values))
        prompts = (f"{seconds:.2f} s" for seconds in (taken.prompt_latents, taken.prompt_keys_and_values))
        table.add_row(str(taken.rows), *steps, *prompts)
    console.print(table)
    now = datetime.now(UTC)
    path = arguments.out or result_path("kv-latents", now)
    report = {
        "question": "a cache of latents beside one of keys and values: bytes per token, seconds of a decode step",
        "date": now.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "bytes": [asdict(size) for size in sizes],
        "steps": [asdict(taken) for taken in times],
    }
    write(path, report)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
