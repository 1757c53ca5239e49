"""Decoding with drafts compared with decoding without them, in one run: `python -m benchmarks.engines.speculation`.

Two engines run alternately, so that other load on the machine slows both. The ratio is that of their fastest
passes. Outputs must be equal. Extraction and rewriting copy from their prompts, stories do not.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

NAMES = ["Ada Berg", "Jon Holm", "Mira Sand", "Nils Eide", "Tora Vik", "Ola Lunde", "Siri Moen", "Per Haug"]
TOWNS = ["Bergen", "Molde", "Narvik", "Hamar", "Arendal", "Larvik", "Bodo", "Horten"]
GOODS = ["lamps", "ropes", "chairs", "kettles", "boots", "maps", "clocks", "tents"]
TASKS = {
    "extract": "Copy every order line of this letter that names a price, word for word:",
    "rewrite": "Correct the spelling of this letter and write it down in full:",
    "story": "Write a story about the sender of this letter:",
}


@dataclass(slots=True)
class Side:
    """One of the two engines."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def run(self, chats: list[list[dict[str, str]]], params: SamplingParams) -> list[list[int]]:
        began, busy = time.perf_counter(), time.process_time()
        outputs = self.llm.chat(chats, params, use_tqdm=False)
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - busy)
        return [output.outputs[0].token_ids for output in outputs]


def letter(rng: random.Random) -> str:
    """Return about 120 tokens of text that no other letter has."""
    lines = [
        f"{rng.randint(2, 90)} {rng.choice(GOODS)} at {rng.randint(3, 400)} kroner each" for _ in range(4)
    ]
    name, town = rng.choice(NAMES), rng.choice(TOWNS)
    return (
        f"Dear shop, my name is {name} and I live in {town}, Havnegata {rng.randint(1, 200)}. Please send me "
        f"{lines[0]}, {lines[1]}, {lines[2]} and {lines[3]} before the {rng.randint(2, 28)}th of March. "
        f"I pay when they arrive. Yours, {name}"
    )


def compare(task: str, rows: int, sides: tuple[Side, Side], args: argparse.Namespace) -> dict[str, Any]:
    plain, drafting = sides
    for side in sides:
        side.seconds, side.processor = [], []
    params = SamplingParams(
        temperature=args.temperature, seed=7, max_tokens=args.tokens, ignore_eos=task == "story"
    )
    before = drafting.llm.engine.stats().scheduler
    num_tokens, differing = 0, 0
    for number in range(args.passes):
        rng = random.Random(1000 * rows + number)
        chats = [[{"role": "user", "content": f"{TASKS[task]}\n\n{letter(rng)}"}] for _ in range(rows)]
        outputs = plain.run(chats, params)
        differing += sum(a != b for a, b in zip(outputs, drafting.run(chats, params), strict=True))
        num_tokens += sum(map(len, outputs))
    after = drafting.llm.engine.stats().scheduler
    drafted = after.drafted_tokens - before.drafted_tokens
    return {
        "task": task,
        "rows": rows,
        "output_tokens": num_tokens,
        "drafted": drafted,
        "accepted": after.accepted_tokens - before.accepted_tokens,
        "differing_outputs": differing,
        "speedup": round(sum(plain.seconds) / sum(drafting.seconds), 3),
        "speedup_by_pass": [round(a / b, 3) for a, b in zip(plain.seconds, drafting.seconds, strict=True)],
        "processor_speedup": round(sum(plain.processor) / sum(drafting.processor), 3),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    args = parser.parse_args()
    file = report.Report("speculation", "decoding with drafts over decoding without", args)
    options: dict[str, Any] = {
        "quantization": args.quantization,
        "dtype": args.dtype,
        "num_kv_blocks": 2048,
        "max_num_seqs": max(64, 2 * max(args.rows)),
    }
    plain = Side(LLM(args.model, **options, num_speculative_tokens=0))
    drafting = Side(LLM(args.model, **options))
    for side in (plain, drafting):
        side.run([[{"role": "user", "content": "Hello"}]], SamplingParams(max_tokens=16))
    runs = [compare(task, rows, (plain, drafting), args) for task in args.tasks for rows in args.rows]
    print(json.dumps(runs, indent=1))
    file.write({"runs": runs})


if __name__ == "__main__":
    main()
