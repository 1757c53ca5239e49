"""The host tier of the prefix cache, compared with an engine without one: `python -m benchmarks.engines.host_tier`.

Two engines with the same small pool run alternately, so that other load on the machine slows both. Weights
are random.

- documents: questions about documents in rotation, together larger than the pool.
- pressure: more long outputs than the pool holds, so that sequences are preempted.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from typing import Any

from benchmarks import report
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

VOCAB_SIZE = 2048
BLOCKS, BLOCK_SIZE = 200, 16
Work = tuple[list[list[int]], int]
"""Prompts, and the number of output tokens of each."""


def documents(rng: random.Random, scale: int) -> list[Work]:
    """Return rounds with one question about each of 8 documents."""
    texts = [tokens(rng, 32 * BLOCK_SIZE) for _ in range(8)]
    return [([[*text, *tokens(rng, 20)] for text in texts], 8) for _ in range(scale)]


def pressure(rng: random.Random, scale: int) -> list[Work]:
    return [([tokens(rng, 64) for _ in range(24)], 160) for _ in range(scale)]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(count)]


WORKLOADS = {"documents": documents, "pressure": pressure}


def save_model(directory: str, layers: int, width: int) -> None:
    """Save a Llama of this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=2048,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def run(llm: LLM, work: Work) -> tuple[list[list[int]], float, float]:
    """Return the outputs, the seconds, and the seconds of CPU time."""
    prompts, length = work
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    began, busy = time.perf_counter(), time.process_time()
    results = llm.generate(prompts, params, use_tqdm=False)
    outputs = [result.outputs[0].token_ids for result in results]
    return outputs, time.perf_counter() - began, time.process_time() - busy


def compare(name: str, sides: dict[str, LLM], rounds: int) -> dict[str, Any]:
    """Run a workload's rounds alternately on both engines; the first round only warms up."""
    seconds = {side: [0.0, 0.0] for side in sides}
    num_tokens, are_equal = 0, True
    before = {side: llm.engine.stats() for side, llm in sides.items()}
    for number, work in enumerate(WORKLOADS[name](random.Random(name), rounds + 1)):
        found = {side: run(llm, work) for side, llm in sides.items()}
        outputs = [each for each, _, _ in found.values()]
        are_equal = are_equal and outputs.count(outputs[0]) == len(outputs)
        if number:
            num_tokens += sum(map(len, work[0])) + sum(map(len, outputs[0]))
            for side, (_, wall, busy) in found.items():
                seconds[side] = [seconds[side][0] + wall, seconds[side][1] + busy]
    result: dict[str, Any] = {"workload": name, "tokens": num_tokens, "equal_outputs": are_equal}
    for side, llm in sides.items():
        old, new = before[side], llm.engine.stats()
        result[side] = {
            "tokens_per_second": round(num_tokens / seconds[side][0]),
            "tokens_per_cpu_second": round(num_tokens / seconds[side][1]),
            "computed_tokens": new.steps.computed_tokens - old.steps.computed_tokens,
            "prefix_hit_tokens": new.kv.prefix_hit_tokens - old.kv.prefix_hit_tokens,
            "host_hit_tokens": new.kv.host_hit_tokens - old.kv.host_hit_tokens,
            "preemptions": new.scheduler.preemptions - old.scheduler.preemptions,
        }
    return result


def main() -> None:
    parser = report.parser(__doc__, model=False)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    args = parser.parse_args()
    file = report.Report("host-tier", "a host tier of the prefix cache over none", args)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, args.layers, args.width)
        options: dict[str, Any] = {
            "num_kv_blocks": BLOCKS,
            "block_size": BLOCK_SIZE,
            "skip_tokenizer_init": True,
        }
        sides = {"none": LLM(directory, **options), "tier": LLM(directory, **options, host_cache_gib=1.0)}
    runs = [compare(name, sides, args.rounds) for name in args.workloads]
    print(json.dumps(runs, indent=1))
    file.write({"runs": runs})


if __name__ == "__main__":
    main()
