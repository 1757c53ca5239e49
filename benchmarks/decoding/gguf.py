"""4-bit GGUF files: Pagemill compared with llama.cpp on the same file, in one run.

    python -m benchmarks.decoding.gguf [--types Q4_0 Q4_K_M] [--rows 1 8 32] [--rounds 3]

llama.cpp rewrites the packaged model's file in each type. Every row has a 32-token prompt and 96 output
tokens; `prompt` is requests of 512 tokens with one output token. Engines run alternately as in
`benchmarks.throughput`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.decoding.rows import Rows, measure
from benchmarks.engines import peers
from benchmarks.engines.contenders import INT8_SUBJECT, SUBJECT, WITHOUT_DRAFTS, Contender
from pagemill.engine.models.packaged import find_gguf

TYPES = {"Q4_0": 2, "Q4_K_M": 15}
"""By name: llama.cpp's number of the file type."""
QUANTIZE = """
import ctypes, sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(options)))
"""


def quantize(source: Path, target: Path, file_type: int) -> None:
    """Write the file's weights in another type. Raises `subprocess.CalledProcessError`."""
    python = peers.LLAMACPP.python()
    command = [str(python), "-c", QUANTIZE, str(source), str(target), str(file_type)]
    subprocess.run(command, check=True, capture_output=True)


def contenders(file: Path, slots: int) -> list[Contender]:
    ours = "benchmarks.engines.pagemill"
    exact = (("enable_prefix_caching", False), *WITHOUT_DRAFTS)
    int8 = (*exact, ("quantization", "int8"), ("kv_cache_dtype", "int8"))
    theirs = (("file", str(file)), ("slots", slots))
    return [
        Contender(SUBJECT, ours, "this engine: the file's values, fp32 sums", options=exact),
        Contender(INT8_SUBJECT, ours, "this engine, int8", options=int8),
        Contender("llama.cpp", "benchmarks.engines.llama_cpp", "llama.cpp", peers.LLAMACPP, options=theirs),
    ]


def measure_type(name: str, given: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    file = directory / f"{name}.gguf"
    quantize(find_gguf(), file, TYPES[name])
    model = report.model_directory(str(file))
    rows = Rows(given.rows, 32, 96, report.config_of(model)["vocab_size"])
    console.print(f"{name}: {file.stat().st_size / 2**20:.0f} MiB")
    return {"file_bytes": file.stat().st_size} | measure(
        rows, str(model), contenders(file, max(given.rows)), given.rounds, console
    )


def main() -> int:
    parser = report.parser(__doc__, model=False)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=list(TYPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if peers.LLAMACPP.python() is None:
        parser.error("llama.cpp: no environment for it; see python -m benchmarks --install-peers")
    file = report.Report("gguf", "tokens per second of 4-bit GGUF files beside llama.cpp, greedy", given)
    console = report.console()
    with tempfile.TemporaryDirectory(prefix="pagemill-gguf-") as directory:
        figures = {name: measure_type(name, given, Path(directory), console) for name in given.types}
    file.write({"types": figures})
    console.print(f"written to {file.path}")
    return 1 if any(each["failures"] for each in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
