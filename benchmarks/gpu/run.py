"""Checks correctness on the local GPU, and measures performance relative to its limits.

    python -m benchmarks.gpu --part preflight    versions, every kernel once, the engine twice: up to 150 s; stops at
                                                 the first failure
    python -m benchmarks.gpu --part first        the same without that stop, then the main results: for a GPU that is
                                                 available for ten minutes
    python -m benchmarks.gpu --part 1            every kernel: complete correctness checks, then timing
    python -m benchmarks.gpu --part 2            the engine, and the worker through Redis
    python -m benchmarks.gpu --part 1 --dry      the same over toy shapes on a CPU, with the reference operators

A part takes less than nine minutes, or up to --seconds. Every section has a time limit, after which it is
aborted. After each section, and on any failure, --out contains part-NAME.json with all rows so far and
part-NAME.log with the output. At the end it also contains triton-NAME.tgz with the compiled kernels. The next
run restores them, so that a new machine does not compile them again. The last lines summarize the part.
Sections run in separate processes: one that fails, hangs or loses the device does not affect the results of
others.

Exit code 0: everything passed, or was skipped for a stated reason; 1: a section failed or a check did not
pass; 2: nothing ran, because there is no CUDA device or the arguments are invalid; 3: nothing failed, but a
section was aborted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu import compiled
from benchmarks.gpu.process import DeviceProcess, OutOfTime
from benchmarks.gpu.registry import ALWAYS, of_part
from benchmarks.gpu.section import PARTS, Bench, Part, Row, Scale, Section, Skipped
from benchmarks.gpu.tables import lines_of, summary_of
from benchmarks.gpu.timing import host_seconds, median_seconds
from benchmarks.report import RESULTS, write

PART_SECONDS = {"preflight": 150.0, "first": 520.0, "1": 520.0, "2": 520.0}
"""Time limit of the last section. The rest of nine minutes is for loading torch and for process exits."""
LOG_BYTES = 8 << 20
SCHEMA = 2

Status = Literal["done", "failed", "cut", "skipped"]


@dataclass
class Outcome:
    section: Section
    status: Status = "done"
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return self.status == "failed" or any(row.ok is False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "section": self.section.name,
            "question": self.section.question,
            "status": self.status,
            "reason": self.reason,
            "limit_s": self.section.seconds,
            "seconds": round(self.seconds, 2),
            "rows": [row.to_json() for row in self.rows],
        }


@dataclass
class PartRun:
    """One part, section by section."""

    part: Part
    bench: Bench
    runner: DeviceProcess
    out: Path
    clock: Callable[[], float] = time.monotonic
    seconds: float | None = None
    """Time limit of the last section. Default: that of the part."""
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, sections: Sequence[Section]) -> int:
        """Return the exit code."""
        started, at = self.clock(), datetime.now(UTC)
        for number, section in enumerate(sections, 1):
            gone = self.clock() - started
            limit = section.seconds if self.bench.scale is Scale.FULL else math.inf
            left = (self.seconds or PART_SECONDS[self.part]) - gone
            left = left if self.bench.scale is Scale.FULL else math.inf
            print(
                f"\n[{self.part}: {number} of {len(sections)}, {gone:.0f} s] {section.name}: {section.question}"
            )
            outcome = self._run_section(section, min(limit, left))
            self.outcomes.append(outcome)
            print("\n".join(lines_of(outcome.rows)), flush=True)
            print(f"  {outcome.status} after {outcome.seconds:.0f} s. {outcome.reason}".rstrip(), flush=True)
            self._write(at, self.clock() - started)
            if self.part == "preflight" and (outcome.is_wrong or outcome.status == "cut"):
                print(f"\npreflight: stopped at {section.name}. Look at: {section.hint}", flush=True)
                break
        wrong = [outcome.section.name for outcome in self.outcomes if outcome.is_wrong]
        cut = [outcome.section.name for outcome in self.outcomes if outcome.status == "cut"]
        found = [(outcome.section.name, row) for outcome in self.outcomes for row in outcome.rows]
        print("\n" + "\n".join(summary_of(found)))
        print(f"{self.part}: wrong: {', '.join(wrong) or 'nothing'}; cut: {', '.join(cut) or 'nothing'}")
        return 1 if wrong else 3 if cut else 0

    def _run_section(self, section: Section, seconds: float) -> Outcome:
        found = {outcome.section.name: outcome.rows for outcome in self.outcomes}
        bench = replace(self.bench, found=found, seconds=seconds)
        outcome, started = Outcome(section), self.clock()
        try:
            for need in section.needs:
                if reason := need(bench):
                    raise Skipped(reason)
            if seconds <= 0:
                raise OutOfTime
            if section.is_alone:
                self.runner.stop()
            with closing(self.runner.rows(section.run, bench)) as rows:
                for row in rows:
                    outcome.rows.append(row)
        except Skipped as reason:
            outcome.status, outcome.reason = "skipped", str(reason)
        except OutOfTime:
            outcome.status, outcome.reason = (
                "cut",
                f"not done after {max(0.0, seconds):.0f} s; rows so far are kept",
            )
        except Exception as error:
            # GPU time is limited: the other sections can still provide results.
            outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {error}"
        if outcome.is_wrong and section.hint:
            outcome.reason = f"{outcome.reason} Look at: {section.hint}".strip()
        outcome.seconds = self.clock() - started
        return outcome

    def _write(self, at: datetime, seconds: float) -> None:
        device = self.bench.device
        write(
            self.out / f"part-{self.part}.json",
            {
                "schema": SCHEMA,
                "part": self.part,
                "scale": self.bench.scale.value,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "started": at.isoformat(timespec="seconds"),
                "seconds": round(seconds, 1),
                "sections": [outcome.to_json() for outcome in self.outcomes],
            },
        )
        log = log_of(self.out, self.part)
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.write_bytes(b"(cut)\n" + log.read_bytes()[-LOG_BYTES // 2 :])


def log_of(out: Path, part: Part) -> Path:
    return out / f"part-{part}.log"


def chosen(part: Part, names: Sequence[str] | None) -> list[Section]:
    """Return the part's sections, or the named ones plus those that are always required. Raises ValueError."""
    sections = of_part(part)
    known = [section.name for section in sections]
    if unknown := sorted(set(names or ()) - set(known)):
        raise ValueError(f"part {part} has no section {', '.join(unknown)}; it has {', '.join(known)}")
    return [section for section in sections if names is None or section.name in {*names, *ALWAYS}]


def bench_of(device: str, scale: Scale) -> Bench:
    return Bench(scale, torch.device(device), host_seconds if device == "cpu" else median_seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, default="preflight", help="default: preflight")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="of the part; default: all, in order")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="default: benchmarks/results/gpu")
    parser.add_argument("--seconds", type=float, metavar="S", help="of the part; default: as it is planned")
    parser.add_argument(
        "--fa3", type=Path, metavar="FILE", help="library of FlashAttention 3 to compare with"
    )
    parser.add_argument("--dry", action="store_true", help="toy shapes on a CPU, without limits of time")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        sections = chosen(options.part, options.sections)
    except ValueError as error:
        parser.error(str(error))
    if not options.dry and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: no CUDA device here (torch.cuda.is_available() is False); --dry needs none",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    log = log_of(options.out, options.part)
    log.unlink(missing_ok=True)
    bench = bench_of("cpu", Scale.TINY) if options.dry else bench_of("cuda", Scale.FULL)
    if not options.dry:
        compiled.restore(options.out)
    bench = replace(bench, fa3=options.fa3)
    runner = DeviceProcess(log)
    try:
        return PartRun(options.part, bench, runner, options.out, seconds=options.seconds).run(sections)
    finally:
        runner.stop()
        if not options.dry:
            compiled.save(options.out, options.part)
