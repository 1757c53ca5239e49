"""The gain of compiled decoder layers: the same generation with them and with the modules they replace, by turns.

`python -m benchmarks.decoder_layer [--rounds N] [--quantization int8]`
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import RESULTS, model_directory
from pagemill.engine.execution.model_runner import ModelRunner
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

NUM_ROWS = (1, 8, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32


class Switch:
    """A model whose layers are the compiled ones, or the modules that they were made of."""

    def __init__(self, llm: LLM) -> None:
        runner = llm.engine._parts.executor
        assert isinstance(runner, ModelRunner)
        self._layers = runner._model.loaded.module.model.layers
        self._compiled = [layer for layer in self._layers if isinstance(layer, FusedDecoderLayer)]
        if len(self._compiled) != len(self._layers):
            raise SystemExit(
                "this model's layers are not compiled here: they need a known family, and AVX2 or int8"
            )

    def set(self, *, compiled: bool) -> None:
        for i, layer in enumerate(self._compiled):
            self._layers[i] = layer if compiled else layer.source


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoder_layer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    parser.add_argument("--quantization", choices=["int8"])
    arguments = parser.parse_args()
    llm = LLM(
        model=str(model_directory(arguments.model)),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 30,
        quantization=arguments.quantization,
    )
    switch = Switch(llm)
    _seconds(llm, max(NUM_ROWS), seed=-1)
    rows = {count: _measure(llm, switch, count, arguments.rounds) for count in NUM_ROWS}
    table = Table("rows", "tokens/s, modules", "tokens/s, compiled", "median of ratios", "lowest", "highest")
    for count, figures in rows.items():
        ratios = figures["ratios"]
        speeds = [f"{statistics.median(figures[name]):.0f}" for name in ("modules", "compiled")]
        numbers = [statistics.median(ratios), min(ratios), max(ratios)]
        table.add_row(str(count), *speeds, *(f"{number:.2f}" for number in numbers))
    Console(width=100).print(table)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "model": arguments.model,
        "quantization": arguments.quantization,
        "rows": rows,
    }
    path = RESULTS / f"decoder-layer-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")


def _measure(llm: LLM, switch: Switch, num_rows: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each, and the ratio within each round; every other round runs the other way round."""
    figures: dict[str, list[float]] = {"modules": [], "compiled": [], "ratios": []}
    for number in range(rounds):
        names = ["modules", "compiled"]
        for name in names if number % 2 else reversed(names):
            switch.set(compiled=name == "compiled")
            figures[name].append(
                num_rows * OUTPUT_TOKENS / _seconds(llm, num_rows, 2 * number + (name == names[0]))
            )
        figures["ratios"].append(figures["compiled"][-1] / figures["modules"][-1])
    return figures


def _seconds(llm: LLM, num_rows: int, seed: int) -> float:
    """Prompts of their own for every pass: the prefix cache holds none of them."""
    draw = random.Random(f"{num_rows} {seed}")
    prompts = [[draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
