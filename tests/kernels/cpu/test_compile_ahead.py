"""A layer's kernels compiled by several processes: none is compiled twice, and none is needed to succeed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
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
PARTS = [PART._replace(name=name) for name in cpu_layer.PARTS]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 2)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started."""
    started: list[subprocess.Popen[bytes]] = []
    start = compile_ahead._start

    def note(parts: Sequence[Part]) -> subprocess.Popen[bytes]:
        started.append(start(parts))
        return started[-1]

    monkeypatch.setattr(compile_ahead, "_start", note)
    return started


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Part]:
    """The parts that are compiled here, where each takes no time."""
    taken: list[Part] = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Part, "compile", lambda part: taken.append(part))
    return taken


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let every other process run this program."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        compile_ahead.subprocess,
        "Popen",
        lambda command, **options: popen([command[0], "-c", program], **options),
    )


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


def wait_for(child: subprocess.Popen[bytes]) -> None:
    child.wait(timeout=120)


def test_what_another_process_compiles_is_loaded(children, monkeypatch):
    """In the tests' own cache, so that the kernels are compiled once for all tests."""
    monkeypatch.setattr(compile_ahead, "_fingerprint", lambda parts: "test")
    marker = Path(numba.config.CACHE_DIR) / "compiled-test"
    marker.unlink(missing_ok=True)
    counts = []
    with report_compiling(lambda count, seconds: counts.append(count), every=0.0):
        compile_apart([PART, PART], meanwhile=lambda: wait_for(children[0]))
    assert children[0].returncode == 0
    assert not counts
    assert marker.exists()
    ran = []
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    assert ran == ["here"]
    assert len(children) == 1, "compiled already"
    marker.unlink()


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


def test_others_begin_with_different_parts(children, compiled, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 8)
    run_instead(monkeypatch, "")
    commands = []
    popen = compile_ahead.subprocess.Popen
    monkeypatch.setattr(
        compile_ahead.subprocess,
        "Popen",
        lambda words, **options: (commands.append(words), popen(words, **options))[1],
    )
    compile_apart(PARTS, meanwhile=lambda: None)
    assert [[Part.of(word) for word in words[4:]] for words in commands] == [PARTS, [*PARTS[1:], PARTS[0]]]


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


def test_a_process_ends_with_the_one_that_started_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # so that it has much to compile
    with compile_ahead._start([PART]) as child:
        assert child.stdin is not None
        child.stdin.close()  # as when this process is killed
        assert child.wait(timeout=120) == 1


def test_a_python_that_cannot_be_started_is_nobodys_harm(compiled, monkeypatch, tmp_path):
    for executable in (str(tmp_path / "nowhere"), ""):
        monkeypatch.setattr(compile_ahead.sys, "executable", executable)
        compile_apart(PARTS, meanwhile=lambda: None)
        next(tmp_path.glob("compiled-*")).unlink()
    assert compiled == PARTS[::-1] * 2


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
