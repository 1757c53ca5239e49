"""A kernel with wrong results or an exception never serves: plain torch replaces it, or the worker exits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.devices import registry
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution import cuda_graphs
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch, reference
from pagemill.kernels.gpu.tuning import MOST_UNWIDENED_ROWS
from pagemill.kernels.self_check import KernelCheck
from tests.engine.execution.fake_gpu import FakeCuda, plain
from tests.engine.tiny_model import save_tiny_llama
from tests.monitoring.snapshots import metrics, scrape, value

_SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_kv_blocks": 64, "num_threads": 1, "max_num_seqs": 8,
}  # fmt: skip
_PROMPTS = [[3, 5, 7], list(range(40)), [9]]
_PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """CUDA's path in the host's memory. The kernels are plain torch under another name, until a test changes one."""

    found = {name: partial(plain(name)) for names in dispatch._MODULES["triton"].values() for name in names}
    device = FakeCuda()
    monkeypatch.setattr(dispatch, "_load", lambda face: found)
    monkeypatch.setattr(dispatch, "_default_face", lambda device_type: "triton")
    monkeypatch.setattr(dispatch, "_replaced", set())
    monkeypatch.setattr(registry, "find_device", lambda name: device)
    monkeypatch.setattr(cuda_graphs, "capture_graph", lambda run, shared: (run(), run)[1])
    return found


def doubled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * kernel(*args, **kwargs)


def raising(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of resource: shared memory\nRequired: 300000")

    return launch


def forgetful(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Writes nothing, although it should write into its arguments."""
    return lambda *args, **kwargs: None


def outputs(directory: Path, **options: Any) -> tuple[LLM, list[list[int]]]:
    llm = LLM(str(directory), **(_SETTINGS | options))
    return llm, [
        result.outputs[0].token_ids for result in llm.generate(_PROMPTS, [_PARAMS] * 3, use_tqdm=False)
    ]


def test_right_kernels_stay(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        llm, _ = outputs(directory)
    assert dispatch.replaced() == []
    compared = next(r.args for r in caplog.records if "compared with plain torch" in r.msg)
    assert isinstance(compared, tuple)
    assert compared[0] >= 4
    assert value(scrape(metrics(llm.engine.stats())), "engine_replaced_kernels") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("paged_attention", doubled, "a relative error of 1 in torch.float32"),
        ("paged_attention", raising, "RuntimeError: out of resource: shared memory"),
        ("rotary_and_cache", forgetful, "8 tensors instead of 9"),
        ("add_low_rank", forgetful, "a relative error of"),
    ],
)
def test_a_wrong_kernel_is_replaced(
    directory: Path, name: str, change: Any, reason: str, kernels: dict[str, Callable[..., Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _, expected = outputs(directory)
    kernels[name] = change(kernels[name])
    llm, found = outputs(directory)
    assert found == expected
    assert dispatch.replaced() == [name]
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert error.startswith(f"the kernel {name} differs from plain torch ({reason}")
    assert "): plain torch replaces it" in error
    assert value(scrape(metrics(llm.engine.stats())), "engine_replaced_kernels") == 1


def test_with_strict_kernels_the_engine_does_not_start(
    directory: Path, kernels: dict[str, Callable[..., Any]]
) -> None:
    kernels["paged_attention"] = doubled(kernels["paged_attention"])
    with pytest.raises(ConfigError, match="the kernel paged_attention differs from plain torch") as caught:
        outputs(directory, strict_kernels=True)
    assert caught.value.setting == "strict_kernels"


def test_kernels_for_many_rows_are_compared(
    directory: Path, kernels: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def count(self: KernelCheck, name: str, kernel: Any, plain: Any, args: Any, kwargs: Any) -> Any:
        counts.append(len(args[0]) if name == "silu_and_mul" else 0)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(KernelCheck, "__call__", count)
    LLM(str(directory), **_SETTINGS)
    assert max(counts) > MOST_UNWIDENED_ROWS


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, {"max_model_len": 32}]
)
def test_small_limits_are_compared_too(
    directory: Path, limits: dict[str, int], kernels: dict[str, Callable[..., Any]]
) -> None:
    kernels["paged_attention"] = doubled(kernels["paged_attention"])
    LLM(str(directory), **(_SETTINGS | limits))
    assert dispatch.replaced() == ["paged_attention"]


def test_rounding_and_unwritten_memory_are_no_fault() -> None:
    check = KernelCheck()
    x = torch.randn(4, 64)
    x[2] = float("nan")  # not yet written
    weight = torch.randn(64)

    def rounded(*args: Any) -> torch.Tensor:
        return reference.rms_norm(*args) * (1 + 1e-5)

    check("rms_norm", rounded, reference.rms_norm, (x, weight, 1e-5), {})
    assert check.wrong == {}
    check("rms_norm", doubled(rounded), reference.rms_norm, (x[:3], weight, 1e-5), {})
    assert "a relative error of 1" in check.wrong["rms_norm"]


def test_a_reference_that_raises_accuses_no_kernel() -> None:
    check = KernelCheck()

    def reference_without_memory(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room for float64")

    assert check("silu_and_mul", torch.neg, reference_without_memory, (torch.ones(1),), {}) == -1
    assert (check.wrong, check.uncompared) == ({}, {"silu_and_mul": "OutOfMemoryError: no room for float64"})
    with pytest.raises(torch.OutOfMemoryError):
        check("quantize_rows", reference_without_memory, torch.neg, (torch.ones(1),), {})
    assert check.wrong == {}


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_few_other_tokens_are_no_fault(share: float) -> None:
    def tokens(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(20)

    def others(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(20) < 20 * share, 99, torch.arange(20))

    check = KernelCheck()
    check("sample_tokens", others, tokens, (torch.zeros(1),), {})
    assert list(check.wrong) == (["sample_tokens"] if share > 0.5 else [])


@dataclass
class Metadata:
    work: torch.Tensor | None = None


Metadata.__module__ = "pagemill.kernels.types.metadata"


def test_what_a_call_derives_and_keeps_is_no_difference() -> None:
    def keeps(x: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        metadata.work = torch.ones(3)
        return -x

    check = KernelCheck()
    check("paged_attention", keeps, lambda x, metadata: -x, (torch.ones(2), Metadata()), {})
    assert (check.wrong, check.uncompared, check.num_compared) == ({}, {}, 1)


def test_layers_of_one_kind_are_compared_once() -> None:
    check = KernelCheck()
    for _ in range(3):
        check("silu_and_mul", reference.silu_and_mul, reference.silu_and_mul, (torch.randn(2, 8),), {})
    check("silu_and_mul", reference.silu_and_mul, reference.silu_and_mul, (torch.randn(3, 8),), {})
    assert check.num_compared == 2
