"""`attention_backend`: checked at startup, and used in every layer, captured steps included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import cpu
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution import cuda_graphs
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch
from pagemill.kernels.gpu import attention, flash_attention
from tests.engine.tiny_model import EOS, VOCAB_SIZE, save_tiny_ministral
from tests.kernels import fa3_op


def test_a_cpu_has_no_other_backend() -> None:
    with pytest.raises(ConfigError, match="'fa3' requires a GPU") as caught:
        CpuBackend().check(EngineConfig(model="m", attention_backend="fa3"), torch.float32)
    assert caught.value.setting == "attention_backend"


@pytest.mark.parametrize(
    ("capability", "message"), [((9, 0), r"install --no-deps vllm"), ((8, 9), r"requires a GPU of .* 9\.x")]
)
def test_a_gpu_without_the_library_is_an_error_at_startup(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(flash_attention, "NAMESPACE", "_no_such_library")
    monkeypatch.setitem(attention.LIBRARIES, "fa3", flash_attention.FlashAttention3())
    for name in ("auto", "triton"):
        CudaBackend().check(EngineConfig(model="m", attention_backend=name), torch.bfloat16)
    with pytest.raises(ConfigError, match=f"attention_backend='fa3': .*{message}") as caught:
        CudaBackend().check(EngineConfig(model="m", attention_backend="fa3"), torch.bfloat16)
    assert caught.value.setting == "attention_backend"


def test_every_layer_of_every_step_calls_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over two groups of layers, one with a window; decode steps replay a recorded capture."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    save_tiny_ministral(tmp_path, kinds, std=0.6, vocab_size=VOCAB_SIZE, eos=EOS)
    monkeypatch.setattr(cpu, "_has_own_products", lambda: False)  # float16 then calls the operators
    expected = _outputs(tmp_path)

    def capture(run: Callable[[], object], pool: list[Any]) -> Callable[[], object]:
        run()
        return run

    fa3_op.register()
    fa3_op.calls.clear()
    monkeypatch.setattr(CpuBackend, "check", lambda *_: None)
    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    monkeypatch.setattr(dispatch, "paged_attention", attention.paged_attention)
    assert _outputs(tmp_path, attention_backend="fa3") == expected
    calls = list(fa3_op.calls)
    assert len(calls) % len(kinds) == 0
    windows = {call["window_size_left"] for call in calls}
    assert windows == {-1, 5}, "a window of 6 keys includes the query's own"
    bounds = {call["max_seqlen_k"] for call in calls if call["max_seqlen_q"] == 1}
    assert max(bounds) == 64, "captured steps have the longest sequence's bound"


def _outputs(directory: Path, **options: Any) -> list[list[int]]:
    llm = LLM(
        str(directory), skip_tokenizer_init=True, dtype="float16", num_kv_blocks=64, max_num_seqs=4, num_threads=1,
        max_model_len=64, max_num_batched_tokens=24, verify=False, **options,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    results = llm.generate([[1, 2, 4, 5, 6], list(range(8, 40)), [9]], params, use_tqdm=False)
    llm.close()
    return [result.outputs[0].token_ids for result in results]
