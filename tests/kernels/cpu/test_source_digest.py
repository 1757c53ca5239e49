"""The cache directory's name depends on every source that machine code can be compiled from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pagemill import kernels

compiler = pytest.importorskip("pagemill.kernels.cpu.jit.compiler")

KERNELS = Path(kernels.__file__).parent
COMPILED = [path.relative_to(KERNELS) for path in KERNELS.rglob("cpu/**/*.py")]
CONSTANTS = [Path("grouped_int8.py"), Path("types/layer_cache.py")]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "kernels"


@pytest.mark.parametrize("name", [*COMPILED, *CONSTANTS], ids=str)
def test_an_edit_gives_another_name(sources: Path, name: Path) -> None:
    before = compiler._source_digest(sources)
    with (sources / name).open("a") as file:
        file.write("\n# edited\n")
    assert compiler._source_digest(sources) != before


def test_a_gpu_kernel_does_not(sources: Path) -> None:
    before = compiler._source_digest(sources)
    (sources / "gpu" / "tuning.py").write_text("")
    assert compiler._source_digest(sources) == before


def test_the_cache_in_use_has_this_name() -> None:
    assert compiler.numba.config.CACHE_DIR.endswith(compiler._source_digest(KERNELS))
