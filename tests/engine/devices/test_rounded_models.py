"""Models with 8-bit matmuls, on CUDA's path: fused and not, in graphs, with adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagemill.engine.devices import registry
from pagemill.engine.execution import cuda_graphs
from pagemill.engine.layers.cuda_fusion import FusedRMSNorm, RoundingMLP
from pagemill.engine.layers.fusion import SiluGatedMLP
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch, row_scaled
from pagemill.kernels.types.scaled_rows import ScaledRows
from tests.engine.adapters.trained import Trained, save_adapter
from tests.engine.execution.fake_gpu import FakeCuda
from tests.engine.tiny_model import save_tiny_llama

PROMPTS = [[1, 2, 4, 5, 6], list(range(8, 40)), [9], [20, 21, 22]]
ROUNDED = pytest.mark.parametrize("quantization", ["int8", "fp8"])


@pytest.fixture(autouse=True)
def cuda_on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA's choices in the host's memory; lists the replays of its graphs."""
    replays: list[int] = []

    def capture(run: Callable[[], object], pool: list[Any]) -> Callable[[], object]:
        run()
        return lambda: (replays.append(1), run())

    monkeypatch.setattr(registry, "find_device", lambda name: FakeCuda())
    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    return replays


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_llama(path, std=0.2)
    return path


def make_llm(directory: Path, **options: Any) -> LLM:
    settings = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24, "dtype": "float32"}
    return LLM(str(directory), skip_tokenizer_init=True, **(settings | options))


def tokens_of(llm: LLM, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False, **options)]


def scores_of(llm: LLM, adapter: str | None = None) -> torch.Tensor:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([PROMPTS[1]], params, adapter=adapter, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([each.logprob for each in output.prompt_logprobs[1:] if each is not None])


@pytest.mark.slow
@ROUNDED
def test_it_follows_the_exact_model(quantization: str, directory: Path, cuda_on_the_host: list[int]) -> None:
    exact, rounded = make_llm(directory), make_llm(directory, quantization=quantization)
    assert rounded.engine.stats().loaded.tier == "continues"
    spread = scores_of(exact).std()
    error = (scores_of(rounded) - scores_of(exact)).abs().mean()
    assert 0 < error < spread * (0.1 if quantization == "int8" else 0.3)
    replayed = tokens_of(rounded)
    assert cuda_on_the_host
    cuda_on_the_host.clear()
    assert tokens_of(make_llm(directory, quantization=quantization, enforce_eager=True)) == replayed
    assert not cuda_on_the_host


@ROUNDED
def test_rounding_with_the_norm_changes_no_bit(
    quantization: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds with the activation: a matmul that rounds its rows itself returns the same."""
    made: list[str] = []
    for name in ("norm_and_quantize", "silu_and_quantize", "quantize_rows"):
        count = _counting(name, getattr(row_scaled, name), made)
        monkeypatch.setattr(dispatch, name, count)
    with dispatch.override("reference"):
        fused = scores_of(make_llm(directory, quantization=quantization, enforce_eager=True))
    assert made[-1] == "quantize_rows"
    while made[-1] == "quantize_rows":  # the head's, once for the prompt's tokens and once for the last
        made.pop()
    assert made[-8:] == ["norm_and_quantize", "quantize_rows", "norm_and_quantize", "silu_and_quantize"] * 2
    monkeypatch.setattr(FusedRMSNorm, "read_by", lambda norm, linear: None)
    monkeypatch.setattr(RoundingMLP, "activated", SiluGatedMLP.activated)
    made.clear()
    with dispatch.override("reference"):
        apart = scores_of(make_llm(directory, quantization=quantization, enforce_eager=True))
    assert torch.equal(apart, fused)
    assert set(made) == {"quantize_rows"}


@ROUNDED
def test_adapters_read_rows_as_they_were(quantization: str, directory: Path, tmp_path: Path) -> None:
    adapter = save_adapter(directory, tmp_path / "a", Trained(std=0.5))
    options: dict[str, Any] = {"adapters": (f"a={adapter}",)}
    exact = make_llm(directory, **options)
    rounded = make_llm(directory, quantization=quantization, **options)
    change = (scores_of(exact, "a") - scores_of(exact)).abs().mean()
    assert (scores_of(rounded, "a") - scores_of(exact, "a")).abs().mean() < change / 5
    alone = tokens_of(rounded)
    assert tokens_of(rounded, adapter=["a", None, None, "a"])[1:3] == alone[1:3]


@pytest.mark.slow
def test_another_device_refuses_its_checkpoints(directory: Path) -> None:
    """A job resumes only if matmuls round in the same way as at its start."""
    ids = {make_llm(directory, quantization=name).engine.fingerprint for name in (None, "int8", "fp8")}
    assert len(ids) == 3


def _counting(name: str, compute: Callable[..., Any], made: list[str]) -> Callable[..., ScaledRows]:
    def count(*given: Any) -> Any:
        made.append(name)
        return compute(*given)

    return count
