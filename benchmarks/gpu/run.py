"""Correctness and speed of the engine and its kernels on the GPU at hand, beside the GPU's limits.

    python -m benchmarks.gpu [--section NAME ...] [--out DIR] [--budget SECONDS]
    python -m benchmarks.gpu --device cpu --dry-run      the same walk over toy sizes, without a GPU

Runs every section in under ten minutes on an H200, needs nothing from outside, prints a table per section and
rewrites DIR/gpu.json after each row, so that an interrupted run keeps what it has. Sections run in processes of their
own: one that fails, hangs or loses the device costs no other its results, and keeps its own rows so far; what engines
wrote to stderr is in DIR/*.log. A section leaves those behind it the time that they need, except for the proof that the
kernels are right; one that no longer fits the budget is left out, and says so; so is `ranks`, one
model on two GPUs, where there is one. Exit code 1: something is wrong; 2: there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import attention
from benchmarks.gpu import correctness as gpu_correctness
from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu.attention import Measure, Shape
from benchmarks.gpu.process import DeviceProcess
from benchmarks.gpu.timing import host_seconds, median_seconds
from benchmarks.report import RESULTS
from pagemill.kernels.gpu.tuning import Tile

Row = dict[str, Any]

_TOY = Shape("toy", 2, 1, 64)
_TOY_TILES = [Tile(16, 32, 4, 1)]


@dataclass
class Session:
    """One run: where, how long, and what the sections have found so far."""

    device: torch.device
    is_dry: bool
    deadline: float
    """Of the section that it is handed to, by `time.perf_counter`."""
    out: Path
    done: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def measure(self) -> Measure:
        return host_seconds if self.is_dry else median_seconds

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    def ceiling(self, name: str) -> float | None:
        rows = self.done.get("ceilings", ())
        return next((row["value"] for row in rows if row.get("ceiling") == name), None)


def machine(session: Session) -> list[Row]:
    """Versions and hardware. Ask for this section with every other: figures mean nothing without it."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    if session.device.type == "cuda":
        properties = torch.cuda.get_device_properties(session.device)
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=False)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": driver.stdout.strip(),
            "cuda": torch.version.cuda,
        }
    facts |= {name: _version(name) for name in ("torch", "triton", "transformers")}
    return [{"fact": fact, "value": value} for fact, value in facts.items()]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def ceilings(session: Session) -> list[Row]:
    """The two rates that everything else is held against: a large copy (bytes read plus written), a product."""
    elements, side = (2**10, 32) if session.is_dry else (2**30, 8192)
    source = torch.empty(elements, dtype=torch.float32, device=session.device).normal_()
    target = torch.empty_like(source)
    copy_seconds = session.measure(lambda: target.copy_(source))
    left = torch.empty(side, side, dtype=torch.bfloat16, device=session.device).normal_()
    right = torch.empty_like(left).normal_()
    product_seconds = session.measure(lambda: torch.mm(left, right))
    return [
        {"ceiling": "copy_gb_per_s", "value": round(2 * source.nbytes / copy_seconds / 1e9, 3)},
        {"ceiling": "bf16_tflop_per_s", "value": round(2 * side**3 / product_seconds / 1e12, 6)},
    ]


def correctness(session: Session) -> Iterator[Row]:
    """Every kernel; in several processes, which at the same time compile what the other sections launch."""
    return gpu_correctness.run(session.device, is_dry=session.is_dry)


def rows(session: Session) -> Iterator[Row]:
    sizes = gpu_rows.TOY_SIZES if session.is_dry else gpu_rows.LLAMA_SIZES
    return gpu_rows.speed(session.device, session.measure, session.ceiling("copy_gb_per_s"), sizes)


def decode(session: Session) -> Iterator[Row]:
    toy: dict[str, Any] = {"shapes": [_TOY], "batch_sizes": [2], "kv_lens": [32], "block_sizes": [16]}
    return attention.decode(
        session.device,
        session.measure,
        session.ceiling("copy_gb_per_s"),
        **(toy | {"bytes_per_call": 2**14} if session.is_dry else {}),
    )


def prefill(session: Session) -> Iterator[Row]:
    toy: dict[str, Any] = {"shapes": [_TOY], "batches": [([16], [16])]}
    ceiling = session.ceiling("bf16_tflop_per_s")
    return attention.prefill(session.device, session.measure, ceiling, **(toy if session.is_dry else {}))


def tiles(session: Session) -> Iterator[Row]:
    toy: dict[str, Any] = {"shape": _TOY, "decodes": [(1, 40)], "prefill_len": 24}
    toy |= {"decode_tiles": _TOY_TILES, "prefill_tiles": _TOY_TILES}
    return attention.tiles(session.device, session.measure, **(toy if session.is_dry else {}))


def _answer(session: Session, job: gpu_engine.Job, timeout_s: float) -> Row:
    log = session.out / f"{job.engine}-{job.model}-{job.num_requests}.log"
    return gpu_engine.run_in_process(job, min(timeout_s, session.seconds_left), log)


def _job(session: Session, model: str, engine: str, **fields: Any) -> gpu_engine.Job:
    """A job, or its toy."""
    if session.is_dry:
        small: dict[str, Any] = {"num_requests": 3, "shortest": 3, "longest": 6, "seconds": 30.0}
        small["options"] = {"num_kv_blocks": 64, "num_threads": 1} if engine == "pagemill" else {}
        model, fields = "tiny", fields | small
    return gpu_engine.Job(model, engine, session.device.type, **fields)


def switches(session: Session) -> list[Row]:
    """Count the requests that differ with each of the engine's options on instead of off: none should."""
    job = _job(session, "tiny", "switches", num_requests=12, shortest=8, longest=48)
    return [_answer(session, job, 600.0 if session.is_dry else 180.0)]


def ranks(session: Session) -> Iterator[Row]:
    """One model on two GPUs: the same tokens as on one, then the speed of it."""
    num_gpus = torch.cuda.device_count()
    if not session.is_dry and num_gpus < 2:
        yield {"left_out": f"{num_gpus} GPU here, 2 needed"}
        return
    job = _job(session, "tiny", "ranks", num_requests=12, shortest=8, longest=48)
    yield _answer(session, job, 600.0 if session.is_dry else 180.0)
    if not session.is_dry:
        options = {"tensor_parallel_size": 2}
        job = _job(session, "llama-3.1-8b", "pagemill", num_requests=256, options=options)
        yield _answer(session, job, 240.0) | options


def end_to_end(session: Session, model: str) -> Iterator[Row]:
    """All requests, and as few as the slow peer gets."""
    for num_requests, share in ((256, 0.6), (64, 1.0)):
        job = _job(session, model, "pagemill", num_requests=num_requests)
        row = _answer(session, job, min(200.0, share * session.seconds_left))
        copy, product = session.ceiling("copy_gb_per_s"), session.ceiling("bf16_tflop_per_s")
        if "error" not in row and copy and product:
            rates = {"copy_gb_per_s": copy, "bf16_tflop_per_s": product}
            floor = gpu_engine.floor_seconds(job.model, *gpu_engine.workload(job), rates)
            row |= {"floor_s": round(floor, 3), "of_roofline": f"{floor / row['seconds']:.0%}"}
        yield row


def peer(session: Session, model: str) -> list[Row]:
    """transformers' continuous batching on 64 requests, or what of them ends within 90 s."""
    seconds = max(10.0, min(90.0, session.seconds_left - 45.0))
    job = _job(session, model, "transformers", num_requests=64, seconds=seconds)
    row = _answer(session, job, seconds + 90.0)
    ours = session.done.get(f"engine {model}", [{}])[-1]
    if "tokens_per_s" in row and "tokens_per_s" in ours:
        row["pagemill_over_it"] = round(ours["tokens_per_s"] / row["tokens_per_s"], 2)
    return [row]


@dataclass(frozen=True)
class Section:
    run: Callable[[Session], Iterable[Row]]
    needs_seconds: float = 5.0
    """Left out where less of the budget remains."""
    limit_seconds: float | None = None
    """Runs in the device's process, and no longer than this; None: makes its own processes, and ends in time."""
    comes_first: bool = False
    """Takes its time, whatever is left for those behind it."""


def _sections() -> dict[str, Section]:
    """In order of what a short lease should bring first."""
    found = {
        "machine": Section(machine, 0.0, 60.0),
        "ceilings": Section(ceilings, 5.0, 60.0),
        "correctness": Section(correctness, 60.0, 180.0, comes_first=True),
        "switches": Section(switches, 60.0),
    }
    models = ("llama-3.1-8b", "qwen3-0.6b")
    for model in models:
        found[f"engine {model}"] = Section(lambda session, model=model: end_to_end(session, model), 90.0)
    found |= {
        "decode": Section(decode, 30.0, 90.0),
        "prefill": Section(prefill, 30.0, 75.0),
        "rows": Section(rows, 15.0, 45.0),
    }
    for model in models:
        found[f"peer {model}"] = Section(lambda session, model=model: peer(session, model), 60.0)
    return found | {"ranks": Section(ranks, 90.0), "tiles": Section(tiles, 30.0, 120.0)}


SECTIONS = _sections()
_SPARE = ("ranks", "tiles")
"""They get what the others leave: nothing is kept for them."""


def print_table(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns] + [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for line in cells:
        print(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), flush=True
        )


def allowance(section: Section, later: Sequence[str], seconds_left: float) -> float:
    """Seconds that a section may take: all that is left but for what `later` ones need, and at least its own need."""
    if section.comes_first:
        return seconds_left
    kept = sum(SECTIONS[name].needs_seconds for name in later if name not in _SPARE)
    return min(seconds_left, max(section.needs_seconds, seconds_left - kept))


def _run_section(name: str, later: Sequence[str], session: Session, device: DeviceProcess) -> None:
    """Append what the section finds to what is done, row by row."""
    section, left = SECTIONS[name], session.seconds_left
    found = session.done[name] = []
    if left < section.needs_seconds:
        found.append({"left_out": f"{left:.0f} s left, {section.needs_seconds:.0f} s needed"})
        return
    if not session.is_dry:  # in the interpreter time says nothing
        seconds = allowance(section, later, left)
        session = replace(session, deadline=session.deadline - left + seconds)
    try:
        rows = section.run(session) if section.limit_seconds is None else _on_device(section, session, device)
        for row in rows:
            found.append(row)
            _save(session)
    except Exception:
        # The device is lent by the minute: the other sections still have something to say.
        traceback.print_exc()
        found.append({"error": traceback.format_exc().strip().splitlines()[-1]})


def _on_device(section: Section, session: Session, device: DeviceProcess) -> Iterator[Row]:
    assert section.limit_seconds is not None
    # In the interpreter time says nothing.
    limit = session.seconds_left if session.is_dry else min(section.limit_seconds, session.seconds_left)
    return device.rows(section.run, session, limit)


def _save(session: Session) -> None:
    """Rewrite the results; a process killed while writing leaves the old ones."""
    path = session.out / "gpu.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(session.done, indent=1) + "\n")
    new.replace(path)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="default: all, in order")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all sections together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes; with --device cpu, interpreted")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.dry_run:
        parser.error("--device cpu measures nothing: it is for --dry-run")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: no CUDA device here (torch.cuda.is_available() is False)",
            file=sys.stderr,
        )
        return 2
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        # Kernels bind to the interpreter when they are defined: too late in this process.
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
        return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=False).returncode

    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + options.budget
    session = Session(torch.device(options.device), options.dry_run, deadline, options.out)
    device, failed = DeviceProcess(), False
    try:
        names = options.section or list(SECTIONS)
        for number, name in enumerate(names):
            started = time.perf_counter()
            _run_section(name, names[number + 1 :], session, device)
            _save(session)
            found = sorted(session.done[name], key=lambda row: bool(row.get("ok", True)))
            failed = failed or any(row.get("ok") is False or "error" in row for row in found)
            print_table(f"{name} ({time.perf_counter() - started:.0f} s)", found)
    finally:
        device.stop()
    return 1 if failed else 0
