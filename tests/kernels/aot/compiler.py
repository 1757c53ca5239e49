"""Compile a Triton kernel for a GPU that is not present, and read the compiler's output."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagemill.kernels.gpu.tuning import Tile

# `make oldest-triton` requires this version: a gate on another version would be meaningless.
assert os.environ.get("PAGEMILL_TRITON", triton.__version__) == triton.__version__

_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"

# Maximum shared memory of one program, in bytes (CUDA programming guide, table of compute capabilities).
SHARED_MEMORY_LIMIT = {
    80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip

_ANY_INTEGER = {
    "stride_table_row", "num_tokens", "num_splits", "num_rows", "num_adapted", "chunks_per_group", "row_tiles",
    "num_choices",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack_bytes: int
    shared_bytes: int
    spill_instructions: int  # loads and stores of local memory
    wgmma: int  # Hopper's tensor-core matmuls
    mma: int  # the older ones
    wgmma8: int  # the same for 8-bit values
    mma8: int
    async_copies: int
    wide_loads: int  # 16 bytes from global memory, synchronous or not


def compile_kernel(
    kernel: Any, arguments: dict[str, Any], capability: int, tile: Tile, *, fp_fusion: bool = True
) -> Compiled:
    """Compile `kernel` like a launch with `arguments`; the compiler must not spill.

    `arguments` maps every parameter to a Triton type ("*bf16", "i32", "fp32") or, for a constexpr, to its
    value, in any order. Pointers and integers are assumed to be multiples of 16, except `_ANY_INTEGER`:
    Triton's launcher detects this at run time, since every supported head dim is a multiple, and compiles for
    it.
    """
    assert set(arguments) == set(kernel.arg_names)
    arguments = {name: arguments[name] for name in kernel.arg_names}
    is_type = {name: isinstance(value, str) for name, value in arguments.items()}
    source = ASTSource(
        fn=kernel,
        signature={name: value if is_type[name] else "constexpr" for name, value in arguments.items()},
        constexprs={name: value for name, value in arguments.items() if not is_type[name]},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, (name, value) in enumerate(arguments.items())
            if _is_multiple_of_16(name, value)
        },
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": fp_fusion}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, sass = _disassemble(result.asm["cubin"])
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None, usage
    compiled = Compiled(
        registers=int(registers[1]),
        stack_bytes=int(registers[2]),
        shared_bytes=result.metadata.shared,
        spill_instructions=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        wgmma=len(re.findall(r"\bHGMMA\b", sass)),
        mma=len(re.findall(r"\bHMMA\b", sass)),
        wgmma8=len(re.findall(r"\b[IQ]GMMA\b", sass)),
        mma8=len(re.findall(r"\b[IQ]MMA\b", sass)),
        async_copies=len(re.findall(r"\bLDGSTS\b", sass)),
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\S*\.128\b", sass)),
    )
    _check_resources(compiled, capability)
    return compiled


def _check_resources(compiled: Compiled, capability: int) -> None:
    """The gate for every kernel: no spills, and no more shared memory than available."""
    assert compiled.stack_bytes == 0, compiled
    assert compiled.spill_instructions == 0, compiled
    assert compiled.shared_bytes <= SHARED_MEMORY_LIMIT[capability], compiled


def _is_multiple_of_16(name: str, value: Any) -> bool:
    return isinstance(value, str) and value != "fp32" and name not in _ANY_INTEGER


def _disassemble(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _cuobjdump("-res-usage", file.name), _cuobjdump("-sass", file.name)


def _cuobjdump(flag: str, cubin: str) -> str:
    command = [str(_TOOLS / "cuobjdump"), flag, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
