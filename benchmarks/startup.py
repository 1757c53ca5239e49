"""Time until a worker's engine is ready, and until a single job's first token, compared with the bare model.

`python -m benchmarks.startup`. `ready`: from the start of a new interpreter until an engine of a converted,
cached model accepts requests. `first start`: the same without cached machine code, with the CPU time of all
its processes, including their exits. `first token`: one request on the idle, warm engine, compared with
transformers' forward pass of the same prompt, alternately, in one process.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.engines.process import ROOT
from benchmarks.workloads import LOWEST_TOKEN_ID

READY_GOAL_S = 5.0
FIRST_START_GOAL_S = 15.0
FIRST_TOKEN_GOAL = 1.5
PROMPT_TOKENS = (16, 128, 512)
START = """
import sys
from pagemill.engine.llm import LLM
llm = LLM(model=sys.argv[1], kv_cache_memory_bytes=2**30)
print("ready", flush=True)
"""


def ready_seconds(model: Path) -> float:
    return seconds_until_ready([sys.executable, "-c", START, str(model)])


def first_start(model: Path) -> tuple[float, float]:
    """Return (seconds until ready, CPU seconds) when every kernel is compiled."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        environment = os.environ | {"NUMBA_CACHE_DIR": directory}
        seconds = seconds_until_ready([sys.executable, "-c", START, str(model)], environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_until_ready(command: list[str], environment: Mapping[str, str] | None = None) -> float:
    """Return the seconds until the process reports ready.

    Its exit with torch takes another second, which does not count.
    """
    started = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - started
        _, errors = child.communicate()
    if line != "ready\n" or child.returncode:
        raise RuntimeError(f"the engine did not start: {errors}")
    return seconds


def first_token_seconds(model: Path, num_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return (Pagemill's seconds, the bare model's), with a new prompt each time."""
    import torch
    from transformers import AutoModelForCausalLM

    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    llm = LLM(model=str(model), skip_tokenizer_init=True, kv_cache_memory_bytes=2**28)
    bare = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(num_tokens)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats + 1):
        prompt = [rng.randrange(LOWEST_TOKEN_ID, bare.config.vocab_size) for _ in range(num_tokens)]
        started = time.perf_counter()
        token = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids[0]
        ours.append(time.perf_counter() - started)
        started = time.perf_counter()
        with torch.inference_mode():
            expected = int(bare(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].argmax())
        theirs.append(time.perf_counter() - started)
        if token != expected:
            print(f"first tokens differ: {token}, bare {expected}; a near-tie, or a fault", file=sys.stderr)
    return ours[1:], theirs[1:]  # the first of each warms up


def table(
    ready: Sequence[float], cold: Sequence[tuple[float, float]], first: dict[int, dict[str, Any]]
) -> Table:
    view = report.table("Start-up and a lone job", ("what",), ("median", "lowest", "beside", "goal"))
    view.add_row(
        "ready", f"{statistics.median(ready):.2f} s", f"{min(ready):.2f} s", "", f"{READY_GOAL_S:.0f} s"
    )
    for seconds, processor in cold:
        beside = f"{processor:.1f} s of processor"
        view.add_row("first start", f"{seconds:.1f} s", "", beside, f"{FIRST_START_GOAL_S:.0f} s")
    for num_tokens, figures in first.items():
        ours, theirs = figures["seconds"], figures["bare_seconds"]
        view.add_row(
            f"first token, {num_tokens} tokens in", f"{1000 * statistics.median(ours):.1f} ms",
            f"{1000 * min(ours):.1f} ms", f"{1000 * statistics.median(theirs):.1f} ms: {figures['ratio']:.2f} x",
            f"{FIRST_TOKEN_GOAL} x",
        )  # fmt: skip
    return view


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=PROMPT_TOKENS)
    parser.add_argument("--first-starts", type=int, default=1, help="that compile every kernel")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    file = report.Report("startup", "seconds until ready, and until a lone job's first token", given)
    model = report.model_directory(given.model)
    ready = [ready_seconds(model) for _ in range(given.repeats + 1)][1:]  # the first one fills the file cache
    cold = [first_start(model) for _ in range(given.first_starts)]
    first: dict[int, dict[str, Any]] = {}
    for num_tokens in given.prompt_tokens:
        ours, theirs = first_token_seconds(model, num_tokens, given.repeats)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        first[num_tokens] = {"seconds": ours, "bare_seconds": theirs, "ratio": ratio}
    console = report.console()
    console.print(table(ready, cold, first))
    file.write({"ready_seconds": ready, "first_starts": cold, "first_token": first})
    console.print(f"written to {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
