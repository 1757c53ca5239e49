"""The number of compilations: one per kernel and machine, for any caller and any number of parallel starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.core.errors import NumbaError

from pagemill.kernels.cpu.jit.compiler import jit

_COUNT = """
import collections, json, os, sys
import torch
from numba.core.codegen import JITCodeLibrary
from numba.core import event
from pagemill.kernels.cpu.jit.kernel import Kernel

code, roots, counting = collections.Counter(), collections.Counter(), set()
optimise = JITCodeLibrary._optimize_final_module

def count(library):
    functions = [function for function in library._final_module.functions if not function.is_declaration]
    functions = [function for function in functions if function.name.startswith("_ZN8pagemill")]
    code.update(function.name for function in functions)
    counting.update(function.name for function in functions if "@NRT_incref" in str(function))
    optimise(library)

class Roots(event.Listener):
    def on_start(self, event): pass
    def on_end(self, event):
        if isinstance(event.data["dispatcher"], Kernel):
            function = event.data["dispatcher"].py_func
            roots[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] += 1

JITCodeLibrary._optimize_final_module = count
event.register("numba:compile", Roots())
"""
_NORM = """
from pagemill.kernels.cpu.fused_rows import rms_norm
x = torch.arange(12.0).view(3, 4)
assert torch.allclose(rms_norm(x, torch.ones(4), 1e-5), torch.nn.functional.rms_norm(x, (4,), eps=1e-5))
"""
_ATTENTION = """
from pagemill.kernels.cpu.layer import stack
for name in ("prefill", "decode"):
    stack.compile_part(name, kind="fp32", cache_dtype=torch.float32)
"""
_MODEL = """
from pagemill.kernels.cpu import operators
from pagemill.kernels.cpu.layer import stack
from pagemill.kernels.cpu.matmul import {kind}
for name in stack.PARTS:
    stack.compile_part(name, kind="{kind}", cache_dtype=torch.{dtype})
{kind}.warm_up()
operators.warm_up()
"""
_REPORT = """
print(json.dumps([code, roots, sorted(counting)]))
"""
_EXPENSIVE = ("attend_tile", "_attend_task", "sum_panel", "multiply_tile", "rms_norm_rows")


def start(program: str, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _COUNT + program + _REPORT]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def report(child: subprocess.Popen[str]) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """(how often LLVM compiled each function, how often each kernel became a root, functions that count references)."""
    output, _ = child.communicate(timeout=570)
    assert child.returncode == 0
    code, roots, counting = json.loads(output)
    return code, roots, counting


def counts(child: subprocess.Popen[str]) -> tuple[dict[str, int], dict[str, int]]:
    return report(child)[:2]


@pytest.mark.slow
def test_a_kernel_that_others_call_is_compiled_once_and_then_loaded(tmp_path: Path) -> None:
    code, roots = counts(start(_NORM, tmp_path))
    assert roots == {"fused_rows.rms_norm_parallel": 1, "fused_rows.rms_norm_rows": 1, "threads._run": 1}
    assert sum("rms_norm_rows" in name for name in code) == 1, "called by its symbol"
    assert counts(start(_NORM, tmp_path))[1] == {}


@pytest.mark.slow
def test_a_kernel_that_is_gone_from_the_disk_is_compiled_for_its_callers(tmp_path: Path) -> None:
    counts(start(_NORM, tmp_path))
    gone = list(tmp_path.rglob("*rms_norm_rows*.nb?"))
    assert gone
    for path in gone:
        path.unlink()
    assert counts(start(_NORM, tmp_path))[1] == {"fused_rows.rms_norm_rows": 1}


@pytest.mark.slow
def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    children = [start(_NORM, tmp_path) for _ in range(3)]
    together = [counts(child)[1] for child in children]
    assert sum(sum(roots.values()) for roots in together) == 3
    assert counts(start(_NORM, tmp_path))[1] == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("int8", "float32"), ("bf16", "bfloat16")])
def test_llvm_meets_the_expensive_kernels_of_a_model_once(kind: str, dtype: str, tmp_path: Path) -> None:
    code, roots = counts(start(_MODEL.format(kind=kind, dtype=dtype), tmp_path))
    assert max(roots.values()) == 1
    for kernel in _EXPENSIVE:
        found = {name: count for name, count in code.items() if kernel in name}
        assert found
        assert set(found.values()) == {1}, (kernel, found)


@pytest.mark.slow
def test_threads_do_not_wait_for_each_others_counts(tmp_path: Path) -> None:
    """Reference counts of shared data, twice per task, once took more time than the tasks."""
    code, _, counting = report(start(_ATTENTION, tmp_path))
    for kernel in ("_attend_task", "_score_task", "_attend_turns", "attend_tile"):
        assert any(kernel in name for name in code)
        assert not any(kernel in name for name in counting), counting


@jit(allocates=True)
def _make(size):
    return np.empty(size, np.uint8)


@jit
def _keep(size):
    return len(_make(size))


@jit
def _pass_on(numbers):
    return numbers[1:]


def test_an_array_that_nobody_would_free_is_refused() -> None:
    with pytest.raises(TypeError, match="_keep calls a function that returns arrays; set allocates=True"):
        _keep(3)
    with pytest.raises(NumbaError, match="returning of array"):
        _pass_on(np.zeros(3))


_STEPS = """
import torch
from numba.core.runtime import rtsys
from tests.kernels.cpu.test_compile_ahead import tiny_layer
layers = tiny_layer()
for _ in range(5):
    layers.warm_up(block_size=4, cache_dtype=torch.float32)
made = rtsys.get_allocation_stats()
assert made.alloc == made.free > 20, made
"""


@pytest.mark.slow
def test_every_array_of_a_step_is_freed() -> None:
    environment = {**os.environ, "NUMBA_NRT_STATS": "1"}
    subprocess.run([sys.executable, "-c", _STEPS], env=environment, check=True, timeout=570)
