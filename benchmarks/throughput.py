"""How many output tokens per second, beside static batches, vLLM and OpenVINO, from the same requests and weights?

Every engine runs in a fresh process of its own, one at a time; the rounds are interleaved (A, B, C, then A, B,
C again), so that a slow minute of the machine does not fall on one engine alone. Ratios are taken in a round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.measure import Request, Timing
from benchmarks.workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parent.parent
SUBJECT = "pagemill"
REFERENCE = "transformers"
SECONDS_LIMIT = 3600


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    module: str
    description: str
    peer: peers.Peer | None = None
    """Whose environment it runs in; None: ours."""
    environment: tuple[tuple[str, str], ...] = ()


CONTENDERS = (
    Contender(SUBJECT, "benchmarks.engine", "this engine, offline"),
    Contender("vllm", "benchmarks.vllm_peer", "vLLM's CPU build, offline", peers.VLLM),
    Contender("openvino", "benchmarks.openvino_peer", "OpenVINO GenAI, fp32", peers.OPENVINO),
    Contender(
        "openvino-int8",
        "benchmarks.openvino_peer",
        "OpenVINO GenAI, int8 weights",
        peers.OPENVINO,
        (("PAGEMILL_BENCH_OPENVINO_WEIGHTS", "int8"),),
    ),
    Contender(REFERENCE, "benchmarks.baselines", "generate(), static FIFO batches of 16"),
)


class BenchmarkError(Exception):
    """An engine's process failed; the message ends with what it last wrote."""


@dataclass(slots=True)
class Measurements:
    """Everything one invocation measured: contender -> one result per round."""

    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def timings(self, contender: str, workload: str) -> list[Timing]:
        found = [Timing(**t) for result in self.results.get(contender, []) for t in result["timings"]]
        return [timing for timing in found if timing.workload == workload]

    def rates(self, contender: str, workload: str) -> list[float]:
        return [timing.tokens_per_second for timing in self.timings(contender, workload)]

    def ratio(self, contender: str, workload: str) -> float | None:
        """How many times the contender's throughput ours is: the median of the rounds' ratios."""
        pairs = zip(self.rates(SUBJECT, workload), self.rates(contender, workload), strict=False)
        ratios = [ours / theirs for ours, theirs in pairs]
        return statistics.median(ratios) if ratios else None

    def equal_outputs(self, contender: str, workload: str) -> tuple[int, int] | None:
        """(requests whose tokens equal transformers', requests). In fp32 only near-ties may differ."""
        theirs, reference = self.timings(contender, workload), self.timings(REFERENCE, workload)
        if not theirs or not reference:
            return None
        pairs = list(zip(theirs[0].outputs, reference[0].outputs, strict=True))
        return sum(a == b for a, b in pairs), len(pairs)


def available_contenders(names: Sequence[str]) -> list[Contender]:
    """The contenders asked for that can run here; says on stderr which one is missing and how to get it."""
    chosen = [contender for contender in CONTENDERS if contender.name in names]
    for peer in {contender.peer for contender in chosen if contender.peer is not None}:
        if peer.python() is None:
            print(
                f"{peer.name}: no environment for it; make one with: python -m benchmarks --install-peers",
                file=sys.stderr,
            )
            chosen = [contender for contender in chosen if contender.peer is not peer]
    return chosen


def measure_all(
    measurements: Measurements, contenders: Sequence[Contender], request: Request, rounds: int,
    console: Console,
) -> Iterator[str]:  # fmt: skip
    """Add one result per engine and round to `measurements`; yields the engine's name after each."""
    for round_number in range(1, rounds + 1):
        for contender in contenders:
            with console.status(
                f"round {round_number} of {rounds}: {contender.name} ({contender.description})"
            ):
                result = _measure(contender, request)
            measurements.results.setdefault(contender.name, []).append(result)
            rates = "  ".join(
                f"{timing.workload} {timing.tokens_per_second:.1f}"
                for timing in (Timing(**item) for item in result["timings"])
            )
            console.print(f"round {round_number} of {rounds}: {contender.name:12} {rates}  tokens/s")
            yield contender.name


def build_request(
    model: str, vocab_size: int, names: Sequence[str], *, seed: int, share: float, kv_cache_gib: int,
    options: dict[str, Any],
) -> Request:  # fmt: skip
    """The timed workloads, and as warm-up a small share of each from another seed."""
    return Request(
        model=model,
        workloads=[WORKLOADS[name](vocab_size, seed, share) for name in names],
        warmup=[WORKLOADS[name](vocab_size, seed + 1, share / 8) for name in names],
        kv_cache_memory_bytes=kv_cache_gib * 2**30,
        options=options,
    )


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    view = Table(title="Output tokens per second (greedy, fp32)")
    view.add_column("workload")
    view.add_column("engine")
    for column in ("best", "median", "rounds", f"{SUBJECT} is", f"same tokens as {REFERENCE}"):
        view.add_column(column, justify="right")
    for workload in workloads:
        counts = (len(workload.prompts), workload.num_prompt_tokens, workload.num_output_tokens)
        shape = "{} requests, {} in, {} out".format(*counts)
        for number, contender in enumerate(measurements.results):
            rates = measurements.rates(contender, workload.name)
            ratio = measurements.ratio(contender, workload.name)
            equal = measurements.equal_outputs(contender, workload.name)
            view.add_row(
                workload.name if number == 0 else shape if number == 1 else "",
                contender,
                f"{max(rates):.1f}",
                f"{statistics.median(rates):.1f}",
                str(len(rates)),
                "" if contender == SUBJECT or ratio is None else f"{ratio:.2f} x",
                "" if contender == REFERENCE or equal is None else f"{equal[0]}/{equal[1]}",
            )
        view.add_section()
    return view


def summary(measurements: Measurements, workloads: Sequence[Workload]) -> dict[str, Any]:
    """What the JSON file holds per workload and engine; output tokens themselves are left out."""
    return {
        workload.name: {
            "requests": len(workload.prompts),
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
            "engines": {
                contender: {
                    "tokens_per_second": [
                        round(rate, 2) for rate in measurements.rates(contender, workload.name)
                    ],
                    "seconds": [round(t.seconds, 3) for t in measurements.timings(contender, workload.name)],
                    "pagemill_ratio": measurements.ratio(contender, workload.name),
                    "outputs_equal_to_transformers": measurements.equal_outputs(contender, workload.name),
                }
                for contender in measurements.results
            },
        }
        for workload in workloads
    }


def _measure(contender: Contender, request: Request) -> dict[str, Any]:
    interpreter, environment = Path(sys.executable), None
    if contender.peer is not None:
        found = contender.peer.python()
        assert found is not None, (
            "available_contenders() lets peers through only when their environment works"
        )
        interpreter = found
        environment = peers.process_environment(request.kv_cache_memory_bytes) | dict(contender.environment)
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as directory:
        request_path, result_path = Path(directory, "request.json"), Path(directory, "result.json")
        request.write(request_path)
        with Path(directory, "log").open("w+") as log:
            finished = subprocess.run(
                [interpreter, "-m", contender.module, request_path, result_path],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                timeout=SECONDS_LIMIT, check=False,
            )  # fmt: skip
            log.seek(0)
            tail = log.read()[-4000:]
        if finished.returncode != 0 or not result_path.exists():
            raise BenchmarkError(f"{contender.name} ended with exit code {finished.returncode}:\n{tail}")
        return json.loads(result_path.read_text())
