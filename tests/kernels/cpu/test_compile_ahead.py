"""A layer's kernels compiled by several processes: none is compiled twice, and failures are tolerated."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

import numba

from pagemill.kernels.cpu.layer import compile_ahead, stack
from pagemill.kernels.cpu.layer import layer as cpu_layer
from pagemill.kernels.cpu.layer.compile_ahead import Part, compile_apart
from pagemill.kernels.cpu.layer.step_buffers import StepBuffers
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.weight_packing import pack
from pagemill.kernels.types.scoring import Scoring

PART = Part("project", kind="fp32", cache_dtype=torch.float32)
PARTS = [PART._replace(name=name) for name in stack.PARTS]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 2)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The started processes."""
    started: list[subprocess.Popen[bytes]] = []
    start = compile_ahead._start

    def note() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(compile_ahead, "_start", note)
    return started


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Part]:
    """The parts that are compiled here, with each compilation replaced by a fast one."""
    taken: list[Part] = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Part, "compile", lambda part: taken.append(part))
    return taken


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Make every other process run this program."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        compile_ahead.subprocess,
        "Popen",
        lambda command, **options: popen([command[0], "-c", program], **options),
    )


def tiny_layer() -> stack.LayerStack:
    def product(out_features: int, in_features: int) -> cpu_layer.Product:
        packed = pack(torch.randn(out_features, in_features), formats=())
        return cpu_layer.Product(
            packed.panels, torch.zeros(len(packed.panels) * PANEL), "fp32", packed.weight_format
        )

    weights = cpu_layer.LayerWeights(
        input_norm=torch.ones(16), qkv=product(3 * 16, 16), q_norm=None, k_norm=None, o=product(16, 16),
        post_attention_norm=torch.ones(16), gate_up=product(64, 16), down=product(16, 32), eps=1e-5,
        qk_eps=0.0, intermediate_size=32, num_heads=1, num_kv_heads=1, head_dim=16,
    )  # fmt: skip
    layer = cpu_layer.DecoderLayer(weights, Scoring(scale=1.0), rotates=True)
    return stack.LayerStack([layer], StepBuffers())


def wait_for(child: subprocess.Popen[bytes]) -> None:
    child.wait(timeout=120)


@pytest.mark.slow
def test_another_process_keeps_what_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with compile_ahead._start() as child:
        compile_ahead._send([PART], child)
        deadline = time.monotonic() + 300
        while not list(tmp_path.rglob("*steps.project*.nbc")):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        compile_ahead._end(child)


def test_what_is_compiled_starts_nothing(children, compiled):
    for _ in range(2):
        compile_apart(PARTS, meanwhile=lambda: None)
    with compile_ahead.compiling_early():
        pass
    assert len(children) == 1


def test_all_is_compiled_here_where_other_processes_fail(children, compiled, monkeypatch, caplog):
    run_instead(monkeypatch, "raise SystemExit(1)")
    compile_apart(PARTS, meanwhile=lambda: wait_for(children[0]))
    assert compiled == PARTS[::-1]
    assert "exit status 1" in caplog.text


def test_all_is_compiled_here_where_another_process_hangs(children, compiled, monkeypatch):
    run_instead(monkeypatch, "import time; time.sleep(600)")
    compile_apart(PARTS, meanwhile=lambda: None)
    assert compiled == PARTS[::-1]
    assert [child.returncode for child in children] == [-9]


def test_others_begin_with_different_parts_and_the_early_one_with_the_first(compiled, children, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 3)
    run_instead(monkeypatch, "import time; time.sleep(600)")
    asked = []
    monkeypatch.setattr(compile_ahead, "_send", lambda parts, other: asked.append((other, list(parts))))
    with compile_ahead.compiling_early():
        assert len(children) == 1
        compile_apart(PARTS, meanwhile=lambda: None)
    assert asked == [(children[0], PARTS), (children[1], [*PARTS[1:], PARTS[0]])]
    assert [child.returncode for child in children] == [-9, -9]


def test_an_early_process_ends_with_a_model_that_does_not_load(compiled, children, monkeypatch):
    run_instead(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt), compile_ahead.compiling_early():
        raise KeyboardInterrupt
    assert [child.returncode for child in children] == [-9]


def test_a_part_is_told_to_another_process():
    assert [Part.from_word(part.word()) for part in PARTS] == PARTS


def test_one_core_or_no_place_to_keep_them_starts_nothing(children, compiled, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    ran = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "cache"))
    compile_apart(PARTS, meanwhile=lambda: ran.append("here"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 1)
    compile_apart(PARTS, meanwhile=lambda: ran.append("here"))
    assert (children, ran) == ([], ["here"] * 2)


def test_processes_end_with_what_runs_meanwhile(children, compiled, monkeypatch):
    run_instead(monkeypatch, "import time; time.sleep(600)")

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_apart(PARTS, meanwhile=fail)
    assert [child.wait(timeout=60) for child in children] == [-9]
    assert not compiled


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # so that there is much to compile
    with compile_ahead._start() as child:
        assert child.stdin is not None
        child.stdin.close()  # as if this process were killed
        assert child.wait(timeout=120) == 1


def test_a_python_that_cannot_be_started_is_nobodys_harm(compiled, monkeypatch, tmp_path):
    for executable in (str(tmp_path / "nowhere"), ""):
        monkeypatch.setattr(compile_ahead.sys, "executable", executable)
        compile_apart(PARTS, meanwhile=lambda: None)
        next(tmp_path.glob("compiled-*")).unlink()
    assert compiled == PARTS[::-1] * 2


@pytest.mark.parametrize("name", stack.PARTS)
def test_a_layer_runs_what_was_compiled(name):
    """A part is compiled for exactly the types with which a layer calls it."""
    kernel = getattr(stack, name)
    stack.compile_part(name, kind="fp32", cache_dtype=torch.float32)
    compiled = set(kernel.signatures)
    assert compiled
    tiny_layer().warm_up(block_size=4, cache_dtype=torch.float32)
    assert set(kernel.signatures) == compiled


def test_a_fingerprint_tells_parts_apart():
    prints = {
        compile_ahead._fingerprint([Part(name, kind, dtype)])
        for name in ("project", "finish")
        for kind in ("fp32", "int8", "bf16")
        for dtype in (torch.float32, torch.int8)
    }
    assert len(prints) == 12
