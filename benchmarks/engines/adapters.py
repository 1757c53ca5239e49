"""Decoding throughput with 0, 1, 4 and 16 adapters in a batch, in one run: `python -m benchmarks.engines.adapters`.

Passes alternate, so that a busy machine slows all of them alike, and processor time is told beside the clock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import machine, report
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

COUNTS = (0, 1, 4, 16)
_PROMPT = "The history of the lighthouse begins with"


def write_adapter(directory: Path, paths: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write random weights for linear layers, given as path -> (inputs, outputs)."""
    torch.manual_seed(seed)
    directory.mkdir(parents=True)
    tensors = {}
    for path, (inputs, outputs) in paths.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = 0.01 * torch.randn(rank, inputs)
        tensors[f"base_model.model.{path}.lora_B.weight"] = 0.01 * torch.randn(outputs, rank)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def linear_layers(model: str) -> dict[str, tuple[int, int]]:
    """Return the linear layers inside the decoder."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(report.model_directory(model))
    return {
        path: (layer.in_features, layer.out_features)
        for path, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and path != "lm_head"
    }


def measure(llm: LLM, rows: int, num_tokens: int, count: int) -> dict[str, float]:
    """Decode `rows` sequences with `count` adapters among them."""
    names = [f"a{number % count}" if count else None for number in range(rows)]
    params = [
        SamplingParams(temperature=0.8, seed=n, max_tokens=num_tokens, ignore_eos=True) for n in range(rows)
    ]
    began, busy = time.perf_counter(), time.process_time()
    llm.generate([_PROMPT] * rows, params, adapter=names, use_tqdm=False)
    seconds, processor = time.perf_counter() - began, time.process_time() - busy
    return {"tokens_per_s": rows * num_tokens / seconds, "processor_s": processor, "seconds": seconds}


def run(model: str, rows: int, num_tokens: int, rank: int, passes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        paths = linear_layers(model)
        folders = [write_adapter(Path(scratch) / f"a{n}", paths, rank, n) for n in range(max(COUNTS))]
        llm = LLM(
            model,
            adapters=tuple(f"{folder.name}={folder}" for folder in folders),
            adapter_slots=max(COUNTS),
            adapter_memory_bytes=4 * 2**30,
            max_num_seqs=rows,
            max_adapter_rank=rank,
        )
        for count in COUNTS:  # loads the adapters, compiles
            measure(llm, rows, 2, count)
        found: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
        for _ in range(passes):
            for count in COUNTS:
                found[count].append(measure(llm, rows, num_tokens, count))
    rates = {count: statistics.median(one["tokens_per_s"] for one in found[count]) for count in COUNTS}
    busy = {count: statistics.median(one["processor_s"] for one in found[count]) for count in COUNTS}
    return {
        "model": model,
        "rows": rows,
        "tokens": num_tokens,
        "rank": rank,
        "passes": passes,
        "adapters": [
            {
                "count": count,
                "tokens_per_s": round(rates[count], 1),
                "of_none": round(rates[count] / rates[0], 3),
                "processor_s": round(busy[count], 2),
                "processor_of_none": round(busy[count] / busy[0], 3),
            }
            for count in COUNTS
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--passes", type=int, default=3)
    given = parser.parse_args()
    started, about = datetime.now(UTC), machine.describe()
    reports = [run(given.model, given.rows, given.tokens, rank, given.passes) for rank in given.ranks]
    print(json.dumps(reports, indent=1))
    report.write(report.result_path("adapters", started), {"machine": about, "runs": reports})


if __name__ == "__main__":
    main()
