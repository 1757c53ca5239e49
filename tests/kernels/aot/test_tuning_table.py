"""The gate for every entry of `pagemill.kernels.gpu.tuning`: compiled ahead of time, for GPUs that are not present."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.kernels.gpu.attention_decode import paged_attention_decode_kernel
from pagemill.kernels.gpu.attention_prefill import paged_attention_prefill_kernel
from pagemill.kernels.gpu.tuning import ATTENTION_TILES, LAUNCHES, AttentionEntry, decode_tile, prefill_tile
from tests.kernels.aot.compiler import Compiled, compile_kernel
from tests.kernels.aot.specializations import decode_arguments, prefill_arguments

WIDEST_HEAD = 256
LARGEST_GROUP = 128


# The architectures that use the tiles of one: sm_86, sm_89 and sm_120 have less shared memory than sm_80.
TUNED = {80: (80, 86, 89, 120), 90: (90, 100)}


def _caches(entry: AttentionEntry, architecture: int) -> Iterator[str | None]:
    if not entry.is_scaled:
        yield None
    if entry.is_scaled is not False and entry.numbers == "half":
        yield "fp8e4nv" if architecture >= 89 else "i8"  # no fp8 before sm_89: the engine rejects it there
        if architecture >= 89:
            yield "i8"


def _cases(kernel: str) -> Iterator[Any]:
    for entry in ATTENTION_TILES:
        tuned = entry.architectures if entry.kernel == kernel else ()
        for architecture in (each for one in tuned for each in TUNED[one]):
            for cache in _caches(entry, architecture):
                for element in ("bf16", "fp16") if entry.numbers == "half" else ("fp32",):
                    # A compilation takes seconds: these are similar to a case that always runs.
                    is_extra = (
                        element == "fp16"
                        or (architecture == 90 and cache == "i8")
                        or architecture not in (80, 90)
                    )
                    rows = min(entry.rows, LARGEST_GROUP)
                    yield pytest.param(
                        entry,
                        element,
                        cache,
                        architecture,
                        id=f"sm_{architecture}-{element}-{cache or element}-{_head_dim(entry)}-{rows}",
                        marks=pytest.mark.slow if is_extra else (),
                    )


def _head_dim(entry: AttentionEntry) -> int:
    """The widest size in models to which an entry applies."""
    return min(entry.head_dim, WIDEST_HEAD)


def _group_size(entry: AttentionEntry) -> int:
    """Three quarters of an entry's maximum rows, so that some are padding."""
    return min(entry.rows, LARGEST_GROUP) * 3 // 4


def _checked(kernel: Any, arguments: dict[str, Any], entry: AttentionEntry, architecture: int) -> Compiled:
    compiled = compile_kernel(kernel, arguments, architecture, entry.tile)
    if entry.numbers == "fp32":
        assert compiled.mma == compiled.wgmma == 0, "exact products, which no tensor core makes"
    return compiled


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "element", "cache", "architecture"), list(_cases("prefill")))
def test_prefill_runs_on_the_tensor_cores(
    entry: AttentionEntry, element: str, cache: str | None, architecture: int
) -> None:
    head_dim, capability = _head_dim(entry), (architecture // 10, architecture % 10)
    size = 4 if element == "fp32" else 2
    assert prefill_tile(head_dim, size, capability, is_scaled=cache is not None) is entry.tile
    arguments = prefill_arguments(element, head_dim, 4, entry.tile, cache=cache)
    compiled = _checked(paged_attention_prefill_kernel, arguments, entry, architecture)
    if entry.numbers == "fp32":
        return
    if architecture == 100:
        return  # its matmuls use another instruction
    assert (compiled.wgmma if architecture == 90 else compiled.mma) > 0
    if cache is None:
        assert compiled.async_copies > 0, "keys and values must be copied behind the products"
        assert compiled.mma == 0 or architecture != 90


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "element", "cache", "architecture"), list(_cases("decode")))
def test_decode_streams_its_keys(
    entry: AttentionEntry, element: str, cache: str | None, architecture: int
) -> None:
    head_dim, group_size = _head_dim(entry), _group_size(entry)
    capability, size = (architecture // 10, architecture % 10), 4 if element == "fp32" else 2
    assert decode_tile(head_dim, group_size, size, capability, is_scaled=cache is not None) is entry.tile
    arguments = decode_arguments(element, head_dim, group_size, entry.tile, cache=cache)
    compiled = _checked(paged_attention_decode_kernel, arguments, entry, architecture)
    if entry.numbers == "fp32":
        return
    if architecture == 100:
        return
    assert compiled.mma + compiled.wgmma > 0
    if cache is None:
        assert compiled.async_copies > 0
        assert compiled.wide_loads >= compiled.async_copies // 2, "keys and values come 16 bytes at a time"


def test_every_other_launch_is_compiled_in_this_folder() -> None:
    """Compares the names that `row_tile` receives; the gate is in `compile_kernel`, as above."""
    asked = {
        node.args[0].value
        for path in Path(__file__).parent.glob("test_compiled*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "row_tile"
        and isinstance(node.args[0], ast.Constant)
    }
    assert asked == set(LAUNCHES)
