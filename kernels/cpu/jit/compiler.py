"""numba, configured once for the CPU operators: one threading layer, cached machine code, raw addresses as arguments.

Kernels receive addresses (`Tensor.data_ptr()`) and strides instead of arrays. Each kernel then has one
compiled signature regardless of the strides of its caller's views, and a call costs a few microseconds. This
matters when a step of a small model makes hundreds of calls. As with Triton, the caller is responsible for
shapes and dtypes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# isort: off
import torch  # before numba: its OpenMP runtime must be the first one loaded
import numba

# isort: on
from numba import types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

from pagemill.kernels import cache_directory
from pagemill.kernels.cpu.jit import file_lock
from pagemill.kernels.cpu.jit.kernel import Kernel

logger = logging.getLogger(__name__)


def _cache_directory() -> str:
    """Return the machine code directory: under NUMBA_CACHE_DIR, next to the package, or in the user's cache.

    numba checks for changes only in a kernel's own file, but kernels inline one another across files. The
    directory is therefore named after the sources of all of them. A private one replaces a directory that is
    not writable.
    """
    package = Path(__file__).parents[2]
    if numba.config.CACHE_DIR:
        base = Path(numba.config.CACHE_DIR)
    elif os.access(package, os.W_OK):
        base = package / "__pycache__"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"
    return str(cache_directory.usable(base, "NUMBA_CACHE_DIR") / f"kernels-{_source_digest(package)}")


def _source_digest(package: Path) -> str:
    """Digest of all sources of CPU kernels, including those next to `cpu/` for their constants, but not in `gpu/`."""
    digest = hashlib.sha256()
    for source in sorted(set(package.rglob("*.py")) - set(package.glob("gpu/*.py"))):
        digest.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]


numba.config.CACHE_DIR = _cache_directory()
# `workqueue` is not thread-safe, and busy-waits against torch's OpenMP threads.
numba.config.THREADING_LAYER = "omp"


def compiles_for(feature: str) -> bool:
    """Return True if kernels are compiled for a CPU with this feature (LLVM's name)."""
    features = numba.config.CPU_FEATURES
    return f"+{feature}" in (codegen.get_host_cpu_features() if features is None else features)


_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18


def _may_use_amx() -> bool:
    """Request AMX registers from Linux for all threads; a process has them only on request."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _drop_refused_features() -> None:
    """Compile for a CPU without AMX if the system rejects the request.

    Cached machine code is keyed by these features.
    """
    if compiles_for("amx-tile") and not _may_use_amx() and numba.config.CPU_FEATURES is None:
        features = codegen.get_host_cpu_features().split(",")
        numba.config.CPU_FEATURES = ",".join(name for name in features if not name.startswith("+amx"))


_drop_refused_features()

# With fewer values per thread, waking the other threads costs more than they save.
NUMBERS_PER_THREAD = 16384

_LONGEST_SAVE_S = 10.0

_OPTIONS: dict[str, Any] = {
    "fastmath": {"nsz", "arcp", "contract", "afn", "reassoc"},
    "error_model": "numpy",  # x / 0 is infinity, or 0 for integers: no exception to unwind
    "nogil": True,
}


def jit(function: Callable[..., Any] | None = None, *, exact: bool = False, allocates: bool = False) -> Any:
    """Compile lazily, for the argument types of the first call, and cache the machine code on disk if possible.

    NaN and infinity keep their meaning (masked scores are -inf). Sums can be reordered, identically in every
    call.

    Args:
        exact: every operation follows IEEE, in the written order, including divisions.
        allocates: the kernel creates arrays, or receives them from its callees. Other kernels do not count references
            to their array arguments, which the callers keep alive. Counting would make threads that share an array
            wait for each other.
    """
    if function is None:
        return lambda f: jit(f, exact=exact, allocates=allocates)
    fast = {"fastmath": False} if exact else {}
    return _make(function, {**_OPTIONS, **fast, "_nrt": allocates})


def _make(function: Callable[..., Any], options: dict[str, Any], *, by_symbol: bool = False) -> Kernel:
    kernel = Kernel(function, options, by_symbol=by_symbol)
    with suppress(RuntimeError):  # no cache location
        kernel.enable_caching()
        _save_one_at_a_time(kernel)
    return kernel


def _save_one_at_a_time(kernel: Any) -> None:
    """Lock the index of a kernel's machine code while it changes.

    numba reads it, adds an entry and writes it back. Without the lock, if two processes compile a kernel for
    different types at the same time, one could permanently receive the other's machine code.
    """
    index = kernel._cache._cache_file
    save = index.save

    def save_alone(key: Any, data: Any) -> None:
        try:
            with file_lock.hold(Path(numba.config.CACHE_DIR) / "index.lock", _LONGEST_SAVE_S):
                save(key, data)
        except OSError as error:  # the disk is full: the kernel works, but is not cached for the next process
            _warn_not_cached(str(error))

    index.save = save_alone


@functools.cache
def _warn_not_cached(reason: str) -> None:
    """Log the warning once."""
    logger.warning("compiled kernels are not kept, so the next start compiles them again: %s", reason)


def external(
    function: Callable[..., Any] | None = None, *, parallel: bool = False, allocates: bool = False
) -> Any:
    """`jit` for a kernel that compiled callers call by its symbol instead of inlining it.

    For large functions that run for microseconds and have several callers: compiled once for all of them.
    """
    if function is None:
        return lambda f: external(f, parallel=parallel, allocates=allocates)
    return _make(function, {**_OPTIONS, "parallel": parallel, "_nrt": allocates}, by_symbol=True)


def _launch_threads() -> None:
    """Start numba's part of the OpenMP pool, which it shares with torch and whose size it would reset."""
    num_threads = torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(num_threads)


_launch_threads()


def use_torch_threads() -> int:
    """Set the number of threads of the calling thread's kernels to that of torch's operators; return it."""
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    return num_threads


def run_rows(kernel: Any, num_rows: int, row_size: int, arguments: tuple[Any, ...]) -> None:
    """Call `kernel(num_threads, num_rows, *arguments)` with an efficient number of threads.

    `row_size` is the number of values in a row.
    """
    num_threads = min(torch.get_num_threads(), num_rows * row_size // NUMBERS_PER_THREAD)
    kernel(min(num_threads, use_torch_threads()) if num_threads > 1 else 1, num_rows, *arguments)


def _pointer_intrinsic(element: Any) -> Any:
    pointer = types.CPointer(element)

    @intrinsic
    def as_pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return pointer(types.int64), generate

    return as_pointer


f32_pointer = _pointer_intrinsic(types.float32)
i8_pointer = _pointer_intrinsic(types.int8)
i32_pointer = _pointer_intrinsic(types.int32)
i64_pointer = _pointer_intrinsic(types.int64)
f64_pointer = _pointer_intrinsic(types.float64)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at `address` (int64); never faults, so the address can be invalid."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch_line(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch_line(builder: Any, address: Any) -> None:
    """Emit `prefetch`, for intrinsics that consist of several instructions."""
    byte_pointer = cgutils.voidptr_t
    flag = cgutils.int32_t
    function = cgutils.get_or_insert_function(
        builder.module,
        cgutils.ir.FunctionType(cgutils.ir.VoidType(), [byte_pointer, flag, flag, flag]),
        "llvm.prefetch.p0",
    )
    # Weights, keys and values are read once per step. They go only into the L1 cache, so that the L2 cache
    # keeps the rows.
    read, keep, data = flag(0), flag(0), flag(1)
    builder.call(function, [builder.inttoptr(address, byte_pointer), read, keep, data])
