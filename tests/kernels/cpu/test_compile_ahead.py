"""A layer's kernels compiled by several processes: none is compiled twice, and none is needed to succeed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

import numba

from pagemill.kernels.cpu.jit.progress import report_compiling
from pagemill.kernels.cpu.layer import compile_ahead
from pagemill.kernels.cpu.layer import layer as cpu_layer
from pagemill.kernels.cpu.layer.compile_ahead import Part, compile_apart
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.weight_packing import pack
from pagemill.kernels.types.scoring import Scoring

PART = Part("project", kind="fp32", cache_dtype=torch.float32)


class Broken(Part):
    def arguments(self) -> list[str]:
        return ["-c", "raise SystemExit(1)", "broken"]

    def compile(self) -> None:
        pass


class Endless(Part):
    def arguments(self) -> list[str]:
        return ["-c", "import time; time.sleep(600)", "endless"]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 2)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started."""
    started: list[subprocess.Popen[bytes]] = []
    start = compile_ahead._start

    def note(part: Part) -> subprocess.Popen[bytes]:
        started.append(start(part))
        return started[-1]

    monkeypatch.setattr(compile_ahead, "_start", note)
    return started


def tiny_layer() -> cpu_layer.DecoderLayer:
    def product(out_features: int, in_features: int) -> cpu_layer.Product:
        packed = pack(torch.randn(out_features, in_features), formats=())
        return cpu_layer.Product(
            packed.panels, torch.zeros(len(packed.panels) * PANEL), "fp32", packed.weight_format
        )

    weights = cpu_layer.LayerWeights(
        input_norm=torch.ones(16),
        qkv=product(3 * 16, 16),
        q_norm=None,
        k_norm=None,
        o=product(16, 16),
        post_attention_norm=torch.ones(16),
        gate_up=product(64, 16),
        down=product(16, 32),
        eps=1e-5,
        qk_eps=0.0,
        intermediate_size=32,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
    )
    return cpu_layer.DecoderLayer(weights, Scoring(scale=1.0), cpu_layer.StepBuffers())


def wait_for(children: list[subprocess.Popen[bytes]], count: int) -> None:
    deadline = time.monotonic() + 120
    while len([child for child in children if child.poll() is not None]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_another_process_compiles_is_loaded(children, monkeypatch):
    """In the tests' own cache, so that the kernels are compiled once for all tests."""
    monkeypatch.setattr(compile_ahead, "_fingerprint", lambda parts: "test")
    marker = Path(numba.config.CACHE_DIR) / "compiled-test"
    marker.unlink(missing_ok=True)
    compile_apart([PART, PART], meanwhile=lambda: wait_for(children, 2))  # so that it takes both
    assert [child.returncode for child in children] == [0, 0]
    assert marker.exists()
    counts = []
    with report_compiling(lambda count, seconds: counts.append(count), every=0.0):
        PART.compile()
    assert not counts
    ran = []
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    assert ran == ["here"]
    assert len(children) == 2, "compiled already"
    marker.unlink()


def test_a_process_that_fails_is_nobodys_harm(children, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    broken = Broken(*PART)
    for runs in (1, 2):
        compile_apart([broken, broken], meanwhile=lambda runs=runs: wait_for(children, 2 * runs))
    assert [child.returncode for child in children] == [1] * 4, "not compiled yet, so tried again"


def test_parts_that_nobody_took_are_compiled_here(children, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    taken = []
    monkeypatch.setattr(Endless, "compile", lambda part: (taken.append(part), children[0].kill()))
    endless = Endless(*PART)

    def wait_for_start() -> None:
        while not children:
            time.sleep(0.01)

    compile_apart([endless, endless], meanwhile=wait_for_start)
    assert taken == [endless]
    assert len(children) == 1


def test_one_core_or_no_place_to_keep_them_starts_nothing(children, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    ran = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "cache"))
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 1)
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    assert (children, ran) == ([], ["here"] * 2)


def test_processes_end_with_what_runs_meanwhile(children, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def fail() -> None:
        while not children:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_apart([Endless(*PART)] * 3, meanwhile=fail)
    assert [child.wait(timeout=60) for child in children] == [-9]


def test_a_process_ends_with_the_one_that_started_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # so that it has much to compile
    with compile_ahead._start(PART) as child:
        assert child.stdin is not None
        child.stdin.close()  # as when this process is killed
        assert child.wait(timeout=120) == 1


def test_a_python_that_cannot_be_started_is_nobodys_harm(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead.sys, "executable", str(tmp_path / "nowhere"))
    compile_apart([Broken(*PART)] * 2, meanwhile=lambda: time.sleep(0.1))
    assert not list(tmp_path.glob("compiled-*[!k]")), "must not count as compiled"
    monkeypatch.setattr(compile_ahead.sys, "executable", "")
    compile_apart([Broken(*PART)] * 2, meanwhile=lambda: None)


@pytest.mark.parametrize("name", cpu_layer.PARTS)
def test_a_layer_runs_what_was_compiled(name):
    """A part is compiled for the very types that a layer calls it with."""
    kernel = getattr(cpu_layer, name)
    cpu_layer.compile_part(name, kind="fp32", cache_dtype=torch.float32)
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
