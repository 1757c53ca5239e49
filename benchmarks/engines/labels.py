"""What the probabilities of all labels cost beside a plain choice: tokens through the model, steps, and time.

Every pass has prompts of its own, so that none is served by the prefix cache. Plain choices and each kind of
`label_probs` take turns; times are ratios to the plain choice's of the same round, by the wall clock and by the CPU.
The counts of tokens and steps are exact.

    python -m benchmarks.engines.labels
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import result_path, write
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.structured_outputs import StructuredOutputs

KINDS = (None, "constrained", "product")
LABELS: dict[str, list[str]] = {
    "differ at once, a token each": [" positive", " negative", " neutral"],
    "differ at once, several tokens": [
        " sports and games", " world politics", " business and finance", " science and technology",
    ],
    "share a prefix": [" customer is angry", " customer is happy", " customer asks for help", " customer cancels"],
    "forty, of several tokens": [f" topic {number}" for number in range(40)],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pass:
    computed_tokens: int
    steps: int
    seconds: float
    cpu_seconds: float


_SEEDS = itertools.count()


def prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Return prompts that were never asked before."""
    draw = random.Random(next(_SEEDS))
    return [
        [draw.randrange(1000, llm.engine.input_processor.vocab_size) for _ in range(length)]
        for _ in range(count)
    ]


def run(llm: LLM, labels: list[str], kind: Any, batch: list[list[int]]) -> Pass:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(choice=tuple(labels)), label_probs=kind, temperature=0.0
    )
    before = llm.engine.stats()
    started, cpu = time.perf_counter(), time.process_time()
    llm.generate(batch, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    after = llm.engine.stats()
    return Pass(
        after.steps.computed_tokens - before.steps.computed_tokens,
        _num_steps(after) - _num_steps(before),
        seconds,
        cpu_seconds,
    )


def _num_steps(stats: Any) -> int:
    return sum(sum(each.counts) for each in stats.histograms["step_tokens"].values())


def measure(llm: LLM, labels: list[str], *, count: int, length: int, rounds: int) -> dict[str, Any]:
    """Return the figures of every kind; ratios are medians over the rounds."""
    run(llm, labels, "product", prompts(llm, 2, length))  # warm-up
    passes: dict[Any, list[Pass]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        order = KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]
        for kind in order:
            passes[kind].append(run(llm, labels, kind, prompts(llm, count, length)))
    plain = passes[None]
    return {
        str(kind): {
            "computed_tokens": each[0].computed_tokens,
            "steps": each[0].steps,
            "tokens_ratio": each[0].computed_tokens / plain[0].computed_tokens,
            "wall_ratio": median(one.seconds / other.seconds for one, other in zip(each, plain, strict=True)),
            "cpu_ratio": median(
                one.cpu_seconds / other.cpu_seconds for one, other in zip(each, plain, strict=True)
            ),
            "passes": [asdict(one) for one in each],
        }
        for kind, each in passes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    at, where = datetime.now(UTC), machine.describe()
    llm = LLM(given.model, kv_cache_memory_bytes=512 << 20)
    found: list[dict[str, Any]] = []
    table = Table("prompt", "labels", "label_probs", "tokens", "steps", "tokens x", "wall x", "CPU x")
    for length in given.lengths:
        for name, labels in LABELS.items():
            figures = measure(llm, labels, count=given.prompts, length=length, rounds=given.rounds)
            found.append({"prompt_tokens": length, "labels": name, "kinds": figures})
            for kind, one in figures.items():
                ratios = [f"{one[ratio]:.3f}" for ratio in ("tokens_ratio", "wall_ratio", "cpu_ratio")]
                table.add_row(
                    str(length), name, kind, str(one["computed_tokens"]), str(one["steps"]), *ratios
                )
    Console(width=120).print(table)
    path = result_path("labels", at)
    write(path, {"machine": where, "options": vars(given), "figures": found})
    print(path)


if __name__ == "__main__":
    main()
