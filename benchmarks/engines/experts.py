"""A mixture of experts with random weights, served here and by transformers' own `generate`, in processor seconds.

    python -m benchmarks.engines.experts [--layers 8] [--experts 64] [--rows 1 8 32]

Decode: new tokens per processor second of rows that start from 8 tokens each; prefill: one prompt of 512 tokens. Each
figure is the difference of a long and a short run, and the engines take turns; the best of the turns counts.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

PROMPT, SHORT, LONG, PREFILL = 8, 2, 10, 512
Generate = Callable[[list[list[int]], int], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), options)
        before = reset_peak()
        llm = LLM(folder, num_threads=1, dtype="float32", num_kv_blocks=512, enable_prefix_caching=False)
        held = (peak_bytes() - before) / size
        print(f"{size / 2**30:.2f} GiB of weights; peak while loading {held:.2f} of them", flush=True)
        model: Any = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        report(options, ours(llm), theirs(model.eval()))


def report(options: argparse.Namespace, *engines: Generate) -> None:
    for rows in options.rows:
        prompts = [[(7 * i + row) % 1000 for i in range(PROMPT)] for row in range(rows)]
        seconds = best(engines, prompts, options.turns, (SHORT, LONG))
        rates = [rows * (LONG - SHORT) / spent for spent in seconds]
        print(line(f"decode, {rows} rows, tokens per processor second", rates), flush=True)
    prompt = [[(7 * i) % 1000 for i in range(PREFILL)]]
    seconds = best(engines, prompt, options.turns, (1,))
    print(line(f"prefill, {PREFILL} tokens, tokens per processor second", [PREFILL / s for s in seconds]))


def line(name: str, rates: list[float]) -> str:
    mine, other = rates
    return f"{name}: pagemill {mine:.1f}, transformers {other:.1f}, ratio {mine / other:.2f}"


def best(
    engines: tuple[Generate, ...], prompts: list[list[int]], turns: int, lengths: tuple[int, ...]
) -> list[float]:
    """Return each engine's least processor time for the last of the lengths, less that for the first of two."""
    for engine in engines:
        engine(prompts, lengths[0])  # what a first step prepares
    found: list[list[list[float]]] = [[[] for _ in lengths] for _ in engines]
    for _ in range(turns):
        for engine, times in zip(engines, found, strict=True):
            for length, spent in zip(lengths, times, strict=True):
                gc.collect()
                started = time.process_time()
                engine(prompts, length)
                spent.append(time.process_time() - started)
    return [min(times[-1]) - (min(times[0]) if len(times) > 1 else 0.0) for times in found]


def ours(llm: LLM) -> Generate:
    def generate(prompts: list[list[int]], count: int) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        return llm.generate(prompts, params, use_tqdm=False)

    return generate


def theirs(model: Any) -> Generate:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: list[list[int]], count: int) -> Any:
        return model.generate(torch.tensor(prompts), do_sample=False, max_new_tokens=count)

    return generate


def write_model(folder: Path, options: argparse.Namespace) -> int:
    """Write a Qwen3-MoE of fp32 numbers; returns its bytes."""
    config = Qwen3MoeConfig(
        vocab_size=32000,
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
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters", flush=True)
    del model
    gc.collect()
    return size


def reset_peak() -> int:
    """Forget the process's peak of memory; returns what it has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
