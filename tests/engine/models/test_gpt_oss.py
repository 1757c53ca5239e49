"""gpt-oss: sinks, windows in every other layer and experts in MXFP4, for any schedule of rows and blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.share import Share
from pagemill.engine.llm import LLM
from pagemill.engine.models.expert_tensors import ExpertLayout, ExpertTensors
from pagemill.engine.models.quantized.float4 import Mxfp4
from pagemill.engine.models.quantized.reader import join_parts
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.mixture_cases import MIXTURE_CASES
from tests.engine.models.families.tiny import NUM_OUTPUT_TOKENS, PROMPTS, TinyCheckpoint
from tests.engine.models.test_families import SMALL_STEPS, make_llm, run

CASES = ("gpt_oss", "gpt_oss, mxfp4")
NEAR = 1e-4
BLOCK = "model.layers.1.mlp"
EXPERTS = f"{BLOCK}.experts"
LAYOUT = ExpertLayout(is_transposed=True, is_interleaved=True)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest) -> TinyCheckpoint:
    return MIXTURE_CASES[request.param]()


@pytest.fixture
def expected(checkpoint: TinyCheckpoint) -> list[list[int]]:
    return [checkpoint.complete(prompt) for prompt in PROMPTS]


def scores(llm: LLM) -> list[list[float]]:
    """The log-probability of every token, of prompts and outputs."""
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    found = []
    for result in llm.generate(PROMPTS, params, use_tqdm=False):
        entries = [*(result.prompt_logprobs or [])[1:], *(result.outputs[0].logprobs or [])]
        found.append([entry.logprob for entry in entries if entry is not None])
    return found


@pytest.mark.slow
def test_log_probabilities_are_transformers(
    checkpoint: TinyCheckpoint, expected: list[list[int]], tmp_path: Path
) -> None:
    """Of prompts in chunks and tokens from the cache; with every row alone, the same bits."""
    checkpoint.write(tmp_path)
    found = scores(make_llm(tmp_path, checkpoint, **SMALL_STEPS))
    for prompt, output, row in zip(PROMPTS, expected, found, strict=True):
        tokens = prompt + output
        for place, score in enumerate(row):
            truth = checkpoint.logits(tokens[: place + 1]).log_softmax(-1)[tokens[place + 1]]
            assert score == pytest.approx(float(truth), abs=NEAR)
    options = SMALL_STEPS | {"batch_invariant": True}
    crowd = scores(make_llm(tmp_path, checkpoint, **(options | {"max_num_batched_tokens": 256})))
    assert scores(make_llm(tmp_path, checkpoint, **options, max_num_seqs=1)) == crowd


@pytest.mark.slow
def test_tokens_of_transformers_own_attention(
    checkpoint: TinyCheckpoint, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in half precision on a CPU: sinks are passed with every call."""
    monkeypatch.setattr(CpuBackend, "fusion", lambda *_: None)
    checkpoint.write(tmp_path)
    assert run(make_llm(tmp_path, checkpoint, **SMALL_STEPS)) == expected


def test_sinks_change_the_tokens(tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["gpt_oss"]()
    tensors = {
        name: torch.full_like(tensor, -1e4) if name.endswith("sinks") else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    replace(checkpoint, tensors=tensors).write(tmp_path)
    assert run(make_llm(tmp_path, checkpoint, **SMALL_STEPS)) != [checkpoint.complete(p) for p in PROMPTS]


def test_layers_with_a_window_give_up_blocks(tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["gpt_oss"]()
    checkpoint.write(tmp_path)
    executor: Any = make_llm(tmp_path, checkpoint, **SMALL_STEPS).engine._parts.executor
    assert [layer.window for layer in executor.kv_cache.layers] == [7, None, 7, None]


@pytest.mark.slow
@pytest.mark.parametrize("host_cache_gib", [0.0, 0.01], ids=["recompute", "host tier"])
def test_tokens_of_preempted_rows(
    host_cache_gib: float, checkpoint: TinyCheckpoint, expected: list[list[int]], tmp_path: Path
) -> None:
    checkpoint.write(tmp_path)
    options = SMALL_STEPS | {"num_kv_blocks": 20, "max_num_batched_tokens": 64, "max_model_len": 40}
    llm = make_llm(tmp_path, checkpoint, **options, host_cache_gib=host_cache_gib)
    assert run(llm) == expected
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.scheduler.preemptions > 0
    assert bool(stats.kv.host_loaded_blocks) == bool(host_cache_gib)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (CASES[1], {}),
        (CASES[1], {"quantization": "int8"}),
        (CASES[0], {}),
        (CASES[0], {"quantization": "int8"}),
    ],
    ids=str,
)
def test_two_ranks(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES[case]()
    checkpoint.write(tmp_path, num_shards=3)
    alone = make_llm(tmp_path, checkpoint, **SMALL_STEPS, **options)
    together = make_llm(tmp_path, checkpoint, **SMALL_STEPS, **options, tensor_parallel_size=2, device="cpu")
    try:
        assert run(together) == run(alone)
    finally:
        together.close()


def test_experts_are_widened_one_at_a_time() -> None:
    """The module gets placeholders, and only the tensors that are being packed are read."""
    tensors = MIXTURE_CASES["gpt_oss, mxfp4"]().tensors
    read: list[int] = []
    weights = join_parts(tensors, Mxfp4({}), torch.float32)
    for name, weight in weights.items():
        if name.startswith(f"{EXPERTS}.gate_up_proj.") and not isinstance(weight, torch.Tensor):
            expert, dense = int(name.rpartition(".")[2]), weight.read
            recorded = replace(weight, read=lambda e=expert, d=dense: (read.append(e), d())[1])
            weights[name] = recorded
    experts = ExpertTensors(weights, torch.float32)
    stacked = [tensor for name, tensor in experts.others.items() if name.startswith(EXPERTS)]
    assert len(stacked) == 4
    assert all(isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() == 4 for t in stacked)
    stored = experts.stored(BLOCK, Share(0, 1), None, LAYOUT)
    assert not read
    assert stored.inner.read(3).shape == (128, 64)
    assert read == [3]


def test_a_share_has_both_projections_of_its_channels() -> None:
    experts = ExpertTensors(MIXTURE_CASES["gpt_oss"]().tensors, torch.float32)
    whole = experts.stored(BLOCK, Share(0, 1), None, LAYOUT)
    parts = [experts.stored(BLOCK, Share(rank, 2), None, LAYOUT) for rank in range(2)]
    assert whole.inner.bias is not None
    for expert in range(6):
        inner = torch.cat([part.inner.read(expert) for part in parts])
        assert torch.equal(inner, whole.inner.read(expert))
        down = torch.cat([part.down.read(expert) for part in parts], dim=1)
        assert torch.equal(down, whole.down.read(expert))
    assert torch.equal(
        torch.cat([p.inner.bias for p in parts if p.inner.bias is not None], 1), whole.inner.bias
    )


Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), f"{EXPERTS}.down_proj.scales is missing"),
        (
            lambda t: (t.pop(f"{EXPERTS}.down_proj_blocks"), t.pop(f"{EXPERTS}.down_proj_scales")),
            f"are missing, {EXPERTS}.down_proj",
        ),
        (lambda t: t[f"{EXPERTS}.down_proj_scales"].fill_(255), "scales that are not finite"),
        (lambda t: t.pop("model.layers.2.self_attn.sinks"), "are missing, model.layers.2.self_attn.sinks"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_bias"), f"are missing, {EXPERTS}.down_proj_bias"),
        (
            lambda t: t.update(
                {f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"][:, :, :, :8]}
            ),
            "has shape [6, 64, 2, 8], quantization_config asks for",
        ),
    ],
    ids=["scales", "part", "not finite", "sinks", "bias", "sizes"],
)
def test_a_damaged_checkpoint_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["gpt_oss, mxfp4"]()
    change(checkpoint.tensors)
    checkpoint.write(tmp_path)
    with pytest.raises(ModelLoadError) as raised:
        make_llm(tmp_path, checkpoint, num_kv_blocks=16)
    assert message in str(raised.value)


def test_mxfp4_without_its_settings_is_refused(tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["gpt_oss, mxfp4"]()
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    replace(checkpoint, config=config).write(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"_blocks is in MXFP4, and config\.json names no quantization_config"
    ):
        make_llm(tmp_path, checkpoint, num_kv_blocks=16)
