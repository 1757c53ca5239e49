"""The cost of more work: throughput as batch, context, shared prefix and KV pool grow, and memory beside it.

`python -m benchmarks.growth`. Each sweep changes one thing. Beside a measured time stands what theory says of its
form, fitted to the measurements by least squares, so that a knee shows as a distance between the two:

- batch: a decode step reads all weights once, whatever the batch, and multiplies them once per row: t = a + b * rows.
  Below a / b rows a step waits for memory and a row more is almost free, above it each row costs its arithmetic.
- context: a row's attention reads all its keys and values: t = a + b * context.
- prefix: rows that share a prefix compute it once, but each still attends to it: t = a + b * prefix, where without
  sharing it would grow by the arithmetic of every row's own copy.
- pool: tokens per second do not depend on it while all rows fit; below that, rows run one after another in groups as
  large as fit, and the batch's curve says what that costs. There is no fit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import model_directory, result_path, write
from benchmarks.workloads import LOWEST_TOKEN_ID

DOCS_IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
OUTPUT_TOKENS = 32
CONTEXT_ROWS = 4
PREFIX_ROWS = 32
OWN_TOKENS = 32
POOL_ROWS = 32
SIZES: dict[str, tuple[int, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "context": (128, 256, 512, 1024, 2048, 4096, 8128),
    "prefix": (0, 128, 256, 512, 1024, 2048),
    "pool": (16, 32, 64, 128, 256),
}


@dataclass(frozen=True, slots=True)
class Point:
    size: int
    seconds: float
    """Batch and context: of one decode step. Prefix and pool: of all the requests. The fastest of the repeats."""
    tokens_per_second: float
    resident_bytes: int
    theory_seconds: float | None = None


class Requests:
    """Prompts that no earlier one shares a token block with."""

    def __init__(self, llm: Any, vocab_size: int) -> None:
        self._llm = llm
        self._rng = random.Random(0)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(LOWEST_TOKEN_ID, self._vocab_size) for _ in range(count)]

    def seconds(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        from pagemill.engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        self._llm.generate(list(prompts), params, use_tqdm=False)
        return time.perf_counter() - started

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """One decode step, whose rows have computed `context` tokens before; the prompts are cached first."""
        prompts = [self.tokens(context) for _ in range(num_rows)]
        self.seconds(prompts, 1)
        one = self.seconds(prompts, 1)
        return max(1e-9, self.seconds(prompts, 1 + OUTPUT_TOKENS) - one) / OUTPUT_TOKENS


def batch_seconds(requests: Requests, rows: int) -> tuple[float, int]:
    return requests.decode_seconds(rows, OWN_TOKENS), rows


def context_seconds(requests: Requests, context: int) -> tuple[float, int]:
    return requests.decode_seconds(CONTEXT_ROWS, context), CONTEXT_ROWS


def prefix_seconds(requests: Requests, length: int) -> tuple[float, int]:
    """(seconds of prompts with a common beginning, tokens of prompts)."""
    shared = requests.tokens(length)
    prompts = [shared + requests.tokens(OWN_TOKENS) for _ in range(PREFIX_ROWS)]
    return requests.seconds(prompts, 1), sum(map(len, prompts))


def pool_seconds(requests: Requests, num_blocks: int) -> tuple[float, int]:
    prompts = [requests.tokens(OWN_TOKENS) for _ in range(POOL_ROWS)]
    return requests.seconds(prompts, OUTPUT_TOKENS), POOL_ROWS * OUTPUT_TOKENS


SWEEPS: dict[str, Callable[[Requests, int], tuple[float, int]]] = {
    "batch": batch_seconds,
    "context": context_seconds,
    "prefix": prefix_seconds,
    "pool": pool_seconds,
}


def chosen_sizes(name: str, largest: int | None) -> tuple[int, ...]:
    """A sweep's sizes up to `largest`, but two of them at least: a line needs two points."""
    sizes = SIZES[name]
    return sizes if largest is None else sizes[: max(2, sum(size <= largest for size in sizes))]


def measure(name: str, sizes: Sequence[int], model: Path, repeats: int, kv_cache_gib: int) -> Iterator[Point]:
    """One sweep's points. A pool is as large as its engine, so that sweep has an engine per point."""
    from pagemill.engine.llm import LLM

    config = json.loads((model / "config.json").read_text())
    llm = None
    for size in sizes:
        if llm is None or name == "pool":
            pool = (
                {"num_kv_blocks": size + 1}
                if name == "pool"
                else {"kv_cache_memory_bytes": kv_cache_gib * 2**30}
            )
            llm = LLM(model=str(model), skip_tokenizer_init=True, max_num_seqs=128, **pool)
            requests = Requests(llm, config["vocab_size"])
            requests.seconds([requests.tokens(OWN_TOKENS)] * 2, 4)  # compiles
        taken = [SWEEPS[name](requests, size) for _ in range(repeats)]
        seconds, tokens = min(taken)
        yield Point(size, seconds, tokens / seconds, _resident_bytes())


def with_theory(points: Sequence[Point]) -> list[Point]:
    """The points with the straight line through their times beside them; relative errors are what is squared."""
    import numpy as np

    sizes = np.array([point.size for point in points], dtype=float)
    seconds = np.array([point.seconds for point in points])
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (start, slope), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    return [
        Point(p.size, p.seconds, p.tokens_per_second, p.resident_bytes, float(start + slope * p.size))
        for p in points
    ]


def table(name: str, points: Sequence[Point]) -> Table:
    view = Table(title=f"Growth with {name}")
    for column in (name, "ms", "theory ms", "tokens/s", "memory GiB"):
        view.add_column(column, justify="right")
    for point in points:
        view.add_row(
            str(point.size),
            f"{1000 * point.seconds:.1f}",
            "" if point.theory_seconds is None else f"{1000 * point.theory_seconds:.1f}",
            f"{point.tokens_per_second:.1f}",
            f"{point.resident_bytes / 2**30:.2f}",
        )
    return view


def plot(name: str, points: Sequence[Point], caption: str, directory: Path) -> Path | None:
    """A PNG of time and throughput; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: they need matplotlib, pip install 'pagemill[bench]'", file=sys.stderr)
        return None
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    times, rates = figure.subplots(1, 2)
    sizes = [point.size for point in points]
    times.plot(sizes, [1000 * point.seconds for point in points], "o-", label="measured")
    if all(point.theory_seconds is not None for point in points):
        theory = [1000 * (point.theory_seconds or 0.0) for point in points]
        times.plot(sizes, theory, "--", color="grey", label="theory, fitted")
    rates.plot(sizes, [point.tokens_per_second for point in points], "o-")
    for axes, label in ((times, "ms"), (rates, "tokens per second")):
        axes.set(xlabel=name, ylabel=label, ylim=(0, None))
        axes.set_xscale("symlog" if 0 in sizes else "log", base=2)
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle(caption, fontsize=8)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"growth-{name}.png"
    figure.savefig(path, dpi=120)
    return path


def _resident_bytes() -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--largest", type=int, help="leave out larger sizes, for a dry run; two stay")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    parser.add_argument("--kv-cache-gib", type=int, default=4)
    parser.add_argument("--images", type=Path, default=DOCS_IMAGES, help="where the plots go")
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    if machine.is_busy():
        print("this machine is busy: a knee may be somebody else's", file=sys.stderr)
    started, where = datetime.now(UTC), machine.describe()
    caption = (
        f"{where['cpu']}, {where['cores']} cores; {given.model}, fp32; {where['commit']}, {started:%Y-%m-%d}"
    )
    model = model_directory(given.model)
    path = given.out or result_path("growth", started)
    console = Console(width=None if sys.stdout.isatty() else 100)
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for name in given.sweeps:
        sizes = chosen_sizes(name, given.largest)
        points = list(measure(name, sizes, model, given.repeats, given.kv_cache_gib))
        points = points if name == "pool" else with_theory(points)
        sweeps[name] = [asdict(point) for point in points]
        write(path, {"date": started.isoformat(timespec="seconds"), "machine": where, "sweeps": sweeps})
        console.print(table(name, points))
        plot(name, points, caption, given.images)
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
