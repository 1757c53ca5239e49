"""Unwritable directories and full disks: a line with the remedy, and the right exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.worker.harness import PATIENCE_S


def pagemill(*words: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "XDG_"))}
    return subprocess.run(
        [*prefix, sys.executable, "-m", "pagemill", *words],
        env=kept | variables, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def full_disk(directory: Path) -> tuple[str, ...]:
    """A command prefix that makes `directory` a full disk, until the command ends."""
    mounted = (
        f'mount -t tmpfs -o size=16k none "{directory}" && head -c 16k /dev/zero > "{directory}/full" || true'
    )
    prefix = ("unshare", "--mount", "--map-root-user", "sh", "-c")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, f'mount -t tmpfs none "{directory}"'], check=False).returncode
    ):
        pytest.skip("nothing can be mounted here, so no disk can be filled")
    return (*prefix, f'{mounted}; exec "$@"', "sh")


def check(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = ended.stderr.splitlines()
    for word in words:
        assert word in line


@pytest.mark.slow
def test_a_state_directory_on_a_full_disk(tmp_path: Path) -> None:
    words = ("worker", "--model", "echo", "--state-dir", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    ended = pagemill(*words, prefix=full_disk(tmp_path / "state"))
    check(ended, 1, "No space left on device", "PAGEMILL_STATE_DIR", str(tmp_path))


@pytest.mark.slow
def test_a_state_directory_that_cannot_be_made() -> None:
    check(
        pagemill("worker", "--model", "echo", "--state-dir", "/proc/state"), 2, "/proc/state", "--state-dir"
    )


@pytest.mark.slow
def test_a_home_that_cannot_be_written() -> None:
    """Not passed on a command line, so not a usage error."""
    check(pagemill("worker", "--model", "echo", HOME="/proc/home"), 1, "/proc/home", "PAGEMILL_STATE_DIR")


@pytest.mark.slow
def test_a_packaged_model_that_cannot_be_kept(tmp_path: Path) -> None:
    words = ("worker", "--model", "smollm2", "--state-dir", str(tmp_path / "state"))
    ended = pagemill(*words, PAGEMILL_CACHE_DIR="/proc/cache")
    assert ended.returncode == 2, ended.stderr
    assert "give PAGEMILL_CACHE_DIR a directory" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


_KERNEL = """
import logging, os, sys
logging.basicConfig(format="%(message)s")
import torch
from pagemill.kernels.cpu import operators
from pagemill.kernels.cpu.jit import compiler
@compiler.jit
def twice(x):
    return x + x
assert twice(21) == 42
print(compiler.numba.config.CACHE_DIR, os.environ.get("PAGEMILL_PRIVATE_KERNEL_CACHE"))
"""


def kernels(directory: Path, prefix: tuple[str, ...] = ()) -> tuple[str, str, str]:
    """The kernels' directory, the children's environment, and the log."""
    ran = subprocess.run(
        [*prefix, sys.executable, "-c", _KERNEL], env=os.environ | {"NUMBA_CACHE_DIR": str(directory)},
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    kept, told = ran.stdout.split()
    return kept, told, ran.stderr


@pytest.mark.slow
def test_kernels_are_kept_in_a_private_directory_where_theirs_cannot_be_written() -> None:
    kept, told, said = kernels(Path("/proc/kernels"))
    assert Path(kept).parent == Path(told)
    assert said.count("can't be kept in /proc/kernels") == 1
    assert "set NUMBA_CACHE_DIR" in said
    assert not Path(told).exists(), "it ends with the process"


@pytest.mark.slow
def test_kernels_compile_on_a_full_disk(tmp_path: Path) -> None:
    kept, told, said = kernels(tmp_path, full_disk(tmp_path))
    assert Path(kept).parent == Path(told) != tmp_path
    assert said.count("No space left on device") == 1


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_only_the_cache(tmp_path: Path) -> None:
    """Not full when the process starts."""
    fills_up = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n@compiler.jit"
    script = tmp_path / "script"  # numba does not cache code that is not in a file
    script.write_text(_KERNEL.replace("@compiler.jit", fills_up))
    ran = subprocess.run(
        [sys.executable, script], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("File too large") == 1


def test_triton_is_given_a_directory_that_it_can_write() -> None:
    script = "import os; from pagemill.kernels import gpu; print(os.environ.get('TRITON_CACHE_DIR'))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(
        command, env=kept | {"HOME": "/proc/home"}, capture_output=True, text=True, check=True
    )
    assert "pagemill-kernels-" in ran.stdout
    assert "set TRITON_CACHE_DIR" in ran.stderr
