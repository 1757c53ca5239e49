"""The cost and gain of fewer bits: perplexity and greedy agreement on real text, against fp32.

    python -m benchmarks.quantization [--windows N] [--variants NAME ...]

Perplexity: over windows of text that every variant scores with `prompt_logprobs`; the change against fp32 comes with
the standard error of the tokens' paired differences, which few windows make large. Agreement: fp32 continues the
start of every window greedily; the variant scores that continuation, and the share of its positions where the
variant would have chosen the same token is the agreement (the variant sees fp32's tokens, so one early difference
does not count again and again). "same start" is how many tokens the variant's own continuation has in common with
fp32's before the first difference. Texts: CPython's language reference, and the product reviews of the demo.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import RESULTS
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
WINDOW = 512
PROMPT = 64
OUTPUT = 64
BASELINE = "fp32"

VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "KV fp16": {"dtype": "float32", "kv_cache_dtype": "float16"},
    "KV bf16": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "KV fp8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "weights int8": {"quantization": "int8"},
    "weights and KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


@dataclass(frozen=True, slots=True)
class Score:
    variant: str
    perplexity: dict[str, float]
    """By text."""
    perplexity_change: dict[str, tuple[float, float]]
    """By text: the share by which it is above fp32's, and that share's standard error."""
    agreement: float
    """Share of fp32's greedy tokens that this variant chooses as well."""
    same_start: float
    """Tokens of the own greedy continuation before it first differs from fp32's, on average."""
    weight_bytes: int
    kv_bytes_per_token: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_texts() -> dict[str, str]:
    reviews = (ROOT / "pagemill" / "demo" / "demo_rows.jsonl").read_text().splitlines()
    return {
        "reference": "\n\n".join(topics[name] for name in sorted(topics)),
        "reviews": "\n".join(json.loads(line)["text"] for line in reviews),
    }


def cut_windows(token_ids: list[int], count: int, length: int) -> list[list[int]]:
    """At most `count` windows of `length` tokens, spread evenly over the text."""
    available = len(token_ids) // length
    step = max(1, available // count)
    return [
        token_ids[number * length : (number + 1) * length]
        for number in range(0, step * min(count, available), step)
    ]


def score_tokens(llm: LLM, windows: list[list[int]]) -> list[float]:
    """The log probability of every token but each window's first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    logprobs = [
        entry.logprob
        for result in llm.generate(windows, params, use_tqdm=False)
        for entry in result.prompt_logprobs or []
        if entry is not None and entry.logprob is not None
    ]
    assert len(logprobs) == sum(len(window) - 1 for window in windows)
    return logprobs


def change(logprobs: list[float], base: list[float]) -> tuple[float, float]:
    """Return the increase of perplexity over the base's, as a share, and its standard error."""
    losses = [theirs - ours for ours, theirs in zip(logprobs, base, strict=True)]
    ratio = math.exp(statistics.fmean(losses))
    return ratio - 1, ratio * statistics.stdev(losses) / math.sqrt(len(losses))


def continue_greedily(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


def agreement(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> float:
    """The share of the expected tokens that are the model's own first choice after those before them."""
    whole = [prompt + output for prompt, output in zip(prompts, expected, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    chosen = [
        entry.top[0][0] == entry.token_id
        for prompt, result in zip(prompts, llm.generate(whole, params, use_tqdm=False), strict=True)
        for entry in (result.prompt_logprobs or [])[len(prompt) :]
        if entry is not None
    ]
    assert len(chosen) == sum(len(output) for output in expected)
    return sum(chosen) / len(chosen)


def common_start(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))


def measure(model: str, names: list[str], num_windows: int, console: Console) -> list[Score]:
    texts, scores, expected = read_texts(), [], []
    base: dict[str, list[float]] = {}
    for name in [BASELINE, *(name for name in names if name != BASELINE)]:
        with console.status(name):
            llm = LLM(model, kv_cache_memory_bytes=2**29, **VARIANTS[name])
            assert llm.engine.tokenizer is not None
            windows = {
                text: cut_windows(llm.engine.tokenizer.encode(content), num_windows, WINDOW)
                for text, content in texts.items()
            }
            prompts = [window[:PROMPT] for found in windows.values() for window in found]
            outputs = continue_greedily(llm, prompts)
            expected = expected or outputs
            logprobs = {text: score_tokens(llm, found) for text, found in windows.items()}
            base = base or logprobs
            stats = llm.engine.stats()
            scores.append(
                Score(
                    name,
                    {text: math.exp(-statistics.fmean(found)) for text, found in logprobs.items()},
                    {text: change(found, base[text]) for text, found in logprobs.items()},
                    agreement(llm, prompts, expected),
                    sum(map(common_start, outputs, expected)) / len(prompts),
                    stats.memory_bytes["weights"],
                    stats.kv.block_bytes / stats.kv.block_size,
                )
            )
            del llm
            gc.collect()
        console.print(json.dumps(scores[-1].to_json()))
    return scores


def table(scores: list[Score]) -> Table:
    base = scores[0]
    view = Table(title="What fewer bits cost and save")
    view.add_column("variant")
    for text in base.perplexity:
        view.add_column(f"perplexity, {text}", justify="right")
    for column in ("greedy agreement", f"same start of {OUTPUT}", "weights, MiB", "KV, bytes a token"):
        view.add_column(column, justify="right")
    for score in scores:
        changes = [
            f"{value:.3f} ({score.perplexity_change[text][0]:+.2%} ± {score.perplexity_change[text][1]:.2%})"
            for text, value in score.perplexity.items()
        ]
        view.add_row(
            score.variant,
            *changes,
            f"{score.agreement:.2%}",
            f"{score.same_start:.1f}",
            f"{score.weight_bytes / 2**20:.0f} ({score.weight_bytes / base.weight_bytes:.0%})",
            f"{score.kv_bytes_per_token:.0f} ({score.kv_bytes_per_token / base.kv_bytes_per_token:.0%})",
        )
    return view


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 tokens per text")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    started, where, console = datetime.now(UTC), machine.describe(), Console(width=140)
    scores = measure(arguments.model, arguments.variants, arguments.windows, console)
    path = arguments.out or RESULTS / f"quantization-{started:%Y%m%dT%H%M%SZ}.json"
    report = {
        "question": "perplexity and greedy agreement against fp32, memory",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "model": arguments.model,
        "settings": {"windows": arguments.windows, "window": WINDOW, "prompt": PROMPT, "output": OUTPUT},
        "scores": [score.to_json() for score in scores],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(table(scores))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
