"""Whose matmuls a CPU uses: the setting, and the measurement that decides on unknown CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pagemill.engine.builder import describe_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import matmul_choice
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.matmul_choice import BUDGET_S, MARGIN, MAX_ROUNDS, ROWS, choose, measure
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.linear import LinearOptions, Matmul
from pagemill.engine.llm import LLM
from pagemill.engine.models.loader import load_model
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.cpu.matmul import bf16, fp32
from tests.engine.tiny_model import save_tiny_llama

needs_own_kernel = pytest.mark.skipif(not fp32.is_supported(), reason="made for AVX2 and AVX-512")
INTEL = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\n"
SHAPES = {(64, 192): 12, (64, 4096): 64}


@dataclass
class SimulatedCPU:
    """A clock that only matmuls advance, by a time per row and a time per call."""

    speedup: Callable[[int], float]
    """How many times as fast oneDNN's matmul is, by the number of rows."""
    seconds_per_row: float = 1e-6
    now: float = 0.0
    calls: int = 0

    def products(self) -> matmul_choice.Products:
        def make(name: Matmul, weight: torch.Tensor) -> nn.Module:
            return _SimulatedProduct(self, name)

        return {"own": lambda weight: make("own", weight), "onednn": lambda weight: make("onednn", weight)}

    def measured(self, shapes: matmul_choice.Shapes = SHAPES) -> float | None:
        return measure(shapes, self.products(), lambda: self.now)


class _SimulatedProduct(nn.Module):
    def __init__(self, cpu: SimulatedCPU, name: Matmul) -> None:
        super().__init__()
        self.cpu, self.name = cpu, name

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seconds = self.cpu.seconds_per_row * len(rows)
        self.cpu.now += seconds / self.cpu.speedup(len(rows)) if self.name == "onednn" else seconds
        self.cpu.calls += 1
        return rows


@dataclass
class _Measurements:
    """Replaces `measure` by a fixed result."""

    speedup: float
    shapes: list[Any] = field(default_factory=list)

    def __call__(self, shapes: matmul_choice.Shapes, products: matmul_choice.Products) -> float:
        for make in products.values():
            assert make(torch.ones(32, 64))(torch.ones(3, 64)).shape == (3, 32)
        self.shapes.append(dict(shapes))
        return self.speedup


def test_the_speedup_is_the_geometric_mean_over_numbers_of_rows() -> None:
    assert SimulatedCPU(lambda num_rows: 2.0).measured() == pytest.approx(2.0)
    assert SimulatedCPU(lambda num_rows: 4.0 if num_rows >= 64 else 1.0).measured() == pytest.approx(2.0)
    assert SimulatedCPU(lambda num_rows: 0.5).measured() == pytest.approx(0.5)


def test_an_interrupted_call_does_not_count() -> None:
    cpu = SimulatedCPU(lambda num_rows: 2.0)
    interrupted = iter([0.01] * 2 * len(ROWS) * len(SHAPES))  # all of the first round

    def clock() -> float:
        cpu.now += next(interrupted, 0.0)
        return cpu.now

    assert measure(SHAPES, cpu.products(), clock) == pytest.approx(2.0)


def test_a_measurement_ends_within_its_budget() -> None:
    quick = SimulatedCPU(lambda num_rows: 1.0)
    quick.measured()
    assert quick.calls == (MAX_ROUNDS * len(ROWS) + 1) * 2 * len(SHAPES)

    slow = SimulatedCPU(
        lambda num_rows: 2.0, seconds_per_row=1e-3
    )  # the largest call takes half of the budget
    assert slow.measured() is None
    assert slow.now <= BUDGET_S + (max(ROWS) + 4) * slow.seconds_per_row


def test_the_budget_holds_for_a_large_model_too() -> None:
    backend = CpuBackend()

    def make(name: Matmul, weight: torch.Tensor) -> nn.Module:
        made = backend.product([weight], None, LinearOptions(matmul=name))
        assert made is not None
        return made

    products: matmul_choice.Products = {
        "own": lambda weight: make("own", weight),
        "onednn": lambda weight: make("onednn", weight),
    }
    sizes: list[int] = []

    def counted(weight: torch.Tensor) -> nn.Module:
        sizes.append(weight.numel())
        return products["own"](weight)

    measure({(8192, 57344): 80, (28672, 8192): 80}, {**products, "own": counted})
    assert max(sizes) <= 2**23  # a part of each weight


@pytest.mark.parametrize(("speedup", "choice"), [(MARGIN + 0.01, "onednn"), (MARGIN - 0.01, "own")])
def test_the_choice_is_measured_once(
    speedup: float, choice: Matmul, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = SimulatedCPU(lambda num_rows: 1.0)
    monkeypatch.setattr(matmul_choice, "measure", lambda shapes, products: speedup)
    directory = tmp_path / "kernels"
    assert choose(SHAPES, cpu.products(), "a CPU", directory) == choice

    monkeypatch.setattr(matmul_choice, "measure", _refuse)
    assert choose(SHAPES, cpu.products(), "a CPU", directory) == choice
    for shapes, kind in ((SHAPES, "another CPU"), ({(64, 4096): 64}, "a CPU")):
        with pytest.raises(AssertionError, match="measured again"):
            choose(shapes, cpu.products(), kind, directory)
    assert [file.suffix for file in directory.iterdir()] == [".json"]


def _refuse(*_: object) -> float:
    raise AssertionError("measured again")


def test_a_small_model_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "measure", _refuse)
    cpu = SimulatedCPU(lambda num_rows: 1.0)
    assert choose({(64, 192): 12}, cpu.products(), "a CPU", tmp_path) == "own"
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_measured_is_measured_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = SimulatedCPU(lambda num_rows: 1.0)
    for speedup, choice in ((None, "own"), (3.0, "onednn")):
        monkeypatch.setattr(matmul_choice, "measure", lambda shapes, products, found=speedup: found)
        assert choose(SHAPES, cpu.products(), "a CPU", tmp_path) == choice


@pytest.mark.parametrize(
    "damage", ["", "{", "{}", '{"speedup": "x"}', '{"speedup": NaN}', '{"speedup": -1}', "[1]"]
)
def test_a_damaged_file_is_replaced(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimulatedCPU(lambda num_rows: 1.0)
    monkeypatch.setattr(matmul_choice, "measure", lambda shapes, products: 3.0)
    choose(SHAPES, cpu.products(), "a CPU", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert choose(SHAPES, cpu.products(), "a CPU", tmp_path) == "onednn"
    monkeypatch.setattr(matmul_choice, "measure", _refuse)
    assert choose(SHAPES, cpu.products(), "a CPU", tmp_path) == "onednn"


def test_a_directory_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(matmul_choice, "measure", lambda shapes, products: 3.0)
    cpu = SimulatedCPU(lambda num_rows: 1.0)
    assert choose(SHAPES, cpu.products(), "a CPU", tmp_path / "file") == "onednn"


def _on_intel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speedup: float) -> _Measurements:
    (tmp_path / "cpuinfo").write_text(INTEL)
    monkeypatch.setattr(matmul_choice, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("pagemill.kernels.cpu.jit.kernel.directory", lambda: tmp_path / "kernels")
    monkeypatch.setattr(matmul_choice, "MIN_WEIGHTS", 0)
    measurements = _Measurements(speedup)
    monkeypatch.setattr(matmul_choice, "measure", measurements)
    return measurements


@needs_own_kernel
def test_auto_measures_on_an_unknown_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_llama(tmp_path)
    config = EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)
    own = load_model(config, CpuBackend())
    measurements = _on_intel(monkeypatch, tmp_path, 3.0)
    measured = load_model(config, CpuBackend())
    assert measured.matmul == "onednn"
    assert measured.fingerprint != own.fingerprint
    assert (
        measured.fingerprint == load_model(EngineConfig(**_given(config, "onednn")), CpuBackend()).fingerprint
    )
    assert own.fingerprint == load_model(EngineConfig(**_given(config, "own")), CpuBackend()).fingerprint
    assert "matmuls: oneDNN" in describe_model(config)
    (shapes,) = measurements.shapes[:1]
    assert (64, own.vocab_size) not in shapes  # the head is outside of the layers
    for option in ({"quantization": "int8"}, {"batch_invariant": True}):
        assert load_model(EngineConfig(**_given(config, "auto", **option)), CpuBackend()).matmul == "own"


def _given(config: EngineConfig, matmul: Matmul | str, **options: object) -> dict[str, Any]:
    return {"model": config.model, "skip_tokenizer_init": True, "matmul": matmul, **options}


def test_amd_is_known() -> None:
    assert matmul_choice.is_measured("AuthenticAMD 26 2 AMD EPYC 1")
    assert not matmul_choice.is_measured("GenuineIntel 6 143")
    assert not matmul_choice.is_measured("")


@needs_own_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_onednn_computes_each_row_alone_as_in_any_batch(dtype: str) -> None:
    torch.manual_seed(1)
    options = LinearOptions(dtype=getattr(torch, dtype), matmul="onednn")
    weight, rows = torch.randn(96, 64) / 8, torch.randn(200, 64)
    product = CpuBackend().product([weight], torch.randn(96), options)
    assert product is not None
    together = product(rows)
    assert together.dtype is torch.float32
    for count in (1, 2, 3, 7, 16, 17, 64, 199):
        assert torch.equal(product(rows[:count]), together[:count]), count


@needs_own_kernel
def test_onednn_generates_the_same_tokens(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = []
    for matmul in ("own", "onednn"):
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=16, dtype="float32", matmul=matmul)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"batch_invariant": True}])
def test_what_needs_own_kernels_is_refused_with_onednn(option: dict[str, Any], tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="matmul='onednn' with") as caught:
        LLM(str(tmp_path), skip_tokenizer_init=True, matmul="onednn", **option)
    assert caught.value.setting == "matmul"


def test_own_needs_a_supported_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_llama(tmp_path)
    monkeypatch.setattr("pagemill.engine.devices.cpu._has_own_products", lambda: False)
    with pytest.raises(ConfigError, match="AVX2"):
        LLM(str(tmp_path), skip_tokenizer_init=True, matmul="own")


@pytest.mark.skipif(not bf16.is_native(), reason="needs AVX-512 BF16")
def test_bfloat16_takes_two_bytes_per_weight() -> None:
    weight = torch.randn(256, 128)
    product = CpuBackend().product([weight], None, LinearOptions(dtype=torch.bfloat16, matmul="onednn"))
    assert product is not None
    stored = [value for value in vars(product).values() if isinstance(value, torch.Tensor)]
    assert [tensor.dtype for tensor in stored] == [torch.bfloat16]
