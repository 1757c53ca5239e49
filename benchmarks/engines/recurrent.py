"""Models with recurrent layers, compared with transformers: `python -m benchmarks.engines.recurrent`.

Both compute the same batch of prompts alternately, so that a busy machine slows both alike. Weights are random, with
values that bfloat16 holds, as those of checkpoints are. `llama` is a dense model beside them.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import report
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

VOCAB_SIZE = 8192
_MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "qwen3_5_text": lambda width, layers: {
        "intermediate_size": 3 * width, "num_attention_heads": width // 128, "num_key_value_heads": 2,
        "head_dim": 128, "linear_num_key_heads": width // 64, "linear_num_value_heads": width // 64,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": (_MIXED * layers)[:layers],
    },
    "mamba2": lambda width, layers: {"num_heads": width // 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
    "mamba": lambda width, layers: {"state_size": 16, "intermediate_size": 2 * width},
    "llama": lambda width, layers: {
        "intermediate_size": 3 * width, "num_attention_heads": width // 128, "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
"""Fields of the configurations of a width and a number of layers."""


def save_model(kind: str, width: int, layers: int, directory: str) -> int:
    """Save a model; returns its number of parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": VOCAB_SIZE}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **sizes, **KINDS[kind](width, layers))
    )
    model.bfloat16().float().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def seconds(run: Callable[[int], list[list[int]]], count: int) -> tuple[float, list[list[int]]]:
    """Return the CPU seconds, which other programs hardly change, and the outputs."""
    began = time.process_time()
    outputs = run(count)
    return time.process_time() - began, outputs


def compare(kind: str, args: Any) -> dict[str, Any]:
    """Return seconds of a prompt and of a token, and how often all outputs were equal."""
    torch.set_num_threads(args.threads)
    prompts = torch.randint(8, VOCAB_SIZE, (args.sequences, args.prompt))
    with tempfile.TemporaryDirectory() as directory:
        num_parameters = save_model(kind, args.width, args.layers, directory)
        options: dict[str, Any] = {"num_threads": args.threads, "enable_prefix_caching": False}
        llm = LLM(directory, dtype="float32", skip_tokenizer_init=True, **options)
        module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def ours(count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        results = llm.generate(prompts.tolist(), params, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results]

    @torch.inference_mode()
    def theirs(count: int) -> list[list[int]]:
        found = module.generate(
            prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        outputs: list[list[int]] = found[:, prompts.shape[1] :].tolist()
        return outputs

    sides = {"pagemill": ours, "transformers": theirs}
    totals, num_equal = {side: [0.0, 0.0] for side in sides}, 0
    for number in range(args.rounds + 1):  # the first round only warms up
        found = {side: (seconds(run, 1)[0], *seconds(run, args.tokens)) for side, run in sides.items()}
        num_equal += found["pagemill"][2] == found["transformers"][2]
        for side, (prompt, whole, _) in found.items() if number else ():
            totals[side][0] += prompt / args.rounds
            totals[side][1] += (whole - prompt) / (args.tokens - 1) / args.rounds
    result: dict[str, Any] = {"kind": kind, "parameters": num_parameters, "equal_rounds": num_equal}
    result |= {side: dict(zip(("prompt_s", "token_s"), both, strict=True)) for side, both in totals.items()}
    result["prompt_ratio"] = totals["transformers"][0] / totals["pagemill"][0]
    result["token_ratio"] = totals["transformers"][1] / totals["pagemill"][1]
    return result


def main() -> None:
    parser = report.parser(__doc__, model=False)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    file = report.Report("recurrent", "models with recurrent layers beside transformers", args)
    runs = [compare(kind, args) for kind in args.kinds]
    print(json.dumps(runs, indent=1))
    file.write({"runs": runs})


if __name__ == "__main__":
    main()
