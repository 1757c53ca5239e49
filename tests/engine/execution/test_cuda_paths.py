"""CUDA's default paths on the CPU: staged inputs, static decode inputs, fused modules, device sampling.

Each is enabled alone and together; outputs must equal those of the plain engine.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution import cuda_graphs
from pagemill.engine.execution.cuda_graphs import DecodeGraphs, buckets_up_to
from pagemill.engine.execution.kv_cache import num_blocks_for
from pagemill.engine.execution.sampling.sampler import Sampler
from pagemill.engine.execution.staging import DirectTransfer, StagedTransfer
from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.cuda_fusion import PreNormLayer
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import StepStats
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from tests.engine.adapters.trained import Trained, save_adapter
from tests.engine.layers.test_decoder_layer import traits_of
from tests.engine.tiny_model import EOS, VOCAB_SIZE, save_tiny_llama, save_tiny_ministral
from tests.monitoring.snapshots import metrics, scrape, value

_CPU = torch.device("cpu")
_PROMPTS = [[1, 2, 4, 5, 6], list(range(8, 40)), [9], [20, 21, 22], list(range(10, 27))]
_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=20),
    SamplingParams(temperature=1.2, top_k=9, seed=6, n=3, max_tokens=9, presence_penalty=0.5),
    SamplingParams(temperature=1.0, min_p=0.1, seed=7, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.7, seed=8, max_tokens=17, ignore_eos=True),
]


@pytest.fixture(scope="module", params=["one group of layers", "groups by window"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    if request.param == "one group of layers":
        save_tiny_llama(path)
    else:
        kinds = ["full_attention", "sliding_attention", "sliding_attention"]
        save_tiny_ministral(path, kinds, std=0.6, vocab_size=VOCAB_SIZE, eos=EOS)
    return path


def _outputs(directory: Path, **options: Any) -> list[list[list[int]]]:
    settings = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24, "num_threads": 1}
    llm = LLM(str(directory), skip_tokenizer_init=True, **(settings | options))
    results = llm.generate(_PROMPTS, _PARAMS, use_tqdm=False)
    llm.engine.check_integrity()
    return [[output.token_ids for output in result.outputs] for result in results]


def _adapted(directory: Path, names: list[str | None], **options: Any) -> tuple[list[Any], StepStats]:
    settings = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24, "num_threads": 1}
    llm = LLM(str(directory), skip_tokenizer_init=True, **(settings | options))
    results = llm.generate(_PROMPTS, _PARAMS, adapter=names, use_tqdm=False)
    assert [result.error for result in results] == [None] * len(results)
    tokens = [[output.token_ids for output in result.outputs] for result in results]
    return tokens, llm.engine.stats().steps


@pytest.fixture(scope="module")
def plain(directory: Path) -> list[list[list[int]]]:
    return _outputs(directory)


@pytest.fixture
def emulated_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs without a GPU: a replay runs the same calls over the same static inputs. Counts the replays."""
    replays: list[int] = []

    def capture(run: Callable[[], object], pool: list[Any]) -> Callable[[], object]:
        run()

        def replay() -> None:
            replays.append(1)
            run()

        return replay

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    return replays


@pytest.mark.parametrize("depth_one", [False, True], ids=["depth0", "depth1"])
def test_staged_inputs_change_nothing(directory: Path, plain: Any, depth_one: bool) -> None:
    assert _outputs(directory, stage_inputs=True, async_scheduling=depth_one) == plain


@pytest.mark.parametrize("depth_one", [False, True], ids=["depth0", "depth1"])
def test_static_decode_inputs_change_nothing(
    directory: Path, plain: Any, depth_one: bool, emulated_graphs: list[int]
) -> None:
    assert _outputs(directory, stage_inputs=True, async_scheduling=depth_one) == plain
    assert len(emulated_graphs) >= 10


def test_steps_with_adapters_are_replayed(
    directory: Path, plain: Any, tmp_path: Path, emulated_graphs: list[int]
) -> None:
    """Rows of two adapters and of none, whose tiles change from step to step."""
    trained = {name: Trained(rank=rank, seed=rank) for name, rank in (("small", 4), ("large", 9))}
    paths = {name: save_adapter(directory, tmp_path / name, one) for name, one in trained.items()}
    options = {"adapters": tuple(f"{name}={path}" for name, path in paths.items()), "stage_inputs": True}
    names = ["small", None, "large", "large", "small"]
    found, stats = _adapted(directory, names, **options)
    assert stats.replayed == len(emulated_graphs) >= 10
    eager, stats = _adapted(directory, names, enforce_eager=True, **options)
    assert stats.replayed == 0
    assert found == eager
    assert found[1] == plain[1]
    assert found != plain
    unexpected, stats = _adapted(directory, [None] * 5, **options)
    assert unexpected == plain
    assert stats.replayed > 0


def test_graphs_of_steps_without_adapters_stay(
    directory: Path,
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model whose steps with adapters can't be captured."""

    def capture(run: Callable[[], object], pool: list[Any]) -> Callable[[], object]:
        run()
        return run

    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    path = save_adapter(directory, tmp_path)
    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    with monkeypatch.context() as capturing:
        capturing.setattr("pagemill.engine.layers.linear.dispatch.add_low_rank", refuse)
        llm = LLM(
            str(directory),
            adapters=(f"one={path}",),
            skip_tokenizer_init=True,
            num_kv_blocks=64,
            num_threads=1,
        )
    assert "no CUDA graphs of steps with adapters: the forward pass can't be captured" in caplog.text
    for adapter, is_replayed in ((None, True), ("one", False)):
        before = llm.engine.stats().steps.replayed
        llm.generate(_PROMPTS, _PARAMS, adapter=adapter, use_tqdm=False)
        assert (llm.engine.stats().steps.replayed > before) == is_replayed


def test_enforce_eager_captures_nothing(
    directory: Path, plain: Any, emulated_graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert _outputs(directory, enforce_eager=True) == plain
    assert not emulated_graphs


def test_steps_that_a_graph_ran_are_counted_apart(directory: Path, emulated_graphs: list[int]) -> None:
    llm = LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=64, num_threads=1)
    llm.generate(_PROMPTS, _PARAMS, use_tqdm=False)
    stats = llm.engine.stats()
    assert 0 < stats.steps.replayed == len(emulated_graphs) < stats.steps.finished
    assert value(scrape(metrics(stats)), "engine_graph_steps_total", mode="graph") == stats.steps.replayed


def test_one_copy_per_step(directory: Path) -> None:
    llm = LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=64, stage_inputs=True, num_threads=1)
    llm.generate(_PROMPTS, _PARAMS, use_tqdm=False)
    runner: Any = llm.engine._parts.executor
    assert runner._transfer.num_copies == llm.engine.stats().steps.finished


def test_a_model_that_cannot_be_captured_runs_without(
    directory: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Callable[[], object], pool: list[Any]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "capture_graph", refuse)
    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    assert _outputs(directory) == plain
    assert "can't be captured" in caplog.text
    llm = LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=64, num_threads=1)
    assert llm.engine.model_parts.startswith("no CUDA graphs; ")
    assert value(scrape(metrics(llm.engine.stats())), "engine_lost_graphs") == 1
    with pytest.raises(ConfigError, match="no CUDA graphs") as caught:
        LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=64, num_threads=1, strict_kernels=True)
    assert caught.value.setting == "strict_kernels"


def test_buckets() -> None:
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(20) == [24, 16, 8, 4, 2, 1]
    assert buckets_up_to(10**6)[0] == 512


def test_rows_beyond_the_largest_bucket_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for max_num_seqs in (512, 513):
        DecodeGraphs(
            lambda _: torch.zeros(1), max_num_seqs=max_num_seqs, max_model_len=32, block_size=16, device=_CPU
        )
    assert [record.getMessage() for record in caplog.records] == [
        "steps of more than 512 sequences run without CUDA graphs; max_num_seqs is 513"
    ]


class TestStagedTransfer:
    def test_tensors_hold_what_was_put_once_it_is_sent(self) -> None:
        transfer = StagedTransfer(CpuBackend())
        arrays = [
            np.arange(7, dtype=np.int32),
            np.zeros(0, dtype=np.int64),
            np.arange(6, dtype=np.int64).reshape(2, 3).T,
            np.array([0.5, -1.0], dtype=np.float64),
        ]
        tensors = [transfer.put(array) for array in arrays]
        transfer.send()
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array)
        assert transfer.num_copies == 1

    def test_tensors_outlive_the_next_step(self) -> None:
        transfer = StagedTransfer(CpuBackend())
        first = transfer.put(np.arange(5))
        transfer.send()
        transfer.put(np.zeros(5, dtype=np.int64))
        transfer.send()
        assert first.tolist() == [0, 1, 2, 3, 4]

    def test_it_grows_with_a_step_that_is_too_large(self) -> None:
        transfer = StagedTransfer(CpuBackend(), num_bytes=64)
        small, large = transfer.put(np.arange(6)), transfer.put(np.arange(100))
        transfer.send()
        assert small.tolist() == list(range(6))
        assert large.tolist() == list(range(100))
        assert transfer.num_copies == 2
        for _ in range(3):
            more = transfer.put(np.arange(100))
            transfer.send()
            assert more.tolist() == list(range(100))

    def test_a_step_without_arrays_copies_nothing(self) -> None:
        transfer = StagedTransfer(CpuBackend())
        transfer.send()
        assert transfer.num_copies == 0

    def test_host_copy(self) -> None:
        (host,) = CpuBackend().to_host([torch.arange(3)]).wait()
        assert host.tolist() == [0, 1, 2]


def test_draws_on_the_device_are_the_ones_on_the_cpu() -> None:
    from pagemill.engine.execution.sampling.processors import SampleWork
    from pagemill.engine.plan import NewRow, Sample

    torch.manual_seed(3)
    logits = 3 * torch.randn(len(_PARAMS), 400)
    work = [
        SampleWork(Sample(row, row, 7 + row), NewRow(row, "r", 1, [1, 2, 3], 3, [], params, seed=77 + row))
        for row, params in enumerate(_PARAMS)
    ]
    table = torch.ones(len(_PARAMS), 16, dtype=torch.int64)
    here = Sampler(()).sample(logits.clone(), work, table)
    for part in (slice(0, 5), slice(3, 5), slice(0, 1)):  # some are drawn, all are, none is
        sampler, transfer = Sampler((), draws_on_device=True), DirectTransfer(_CPU)
        draws = sampler.stage(work[part], logits.shape[1], transfer)
        there = sampler.sample(logits[part].clone(), work[part], table, draws)
        assert there.token_ids.tolist() == here.token_ids[part].tolist()


def test_a_draw_on_the_device_gets_the_peak_of_a_biased_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale peak would put the biased token at a negative distance, which the kernel excludes."""
    from pagemill.engine.execution.sampling.processors import SampleWork
    from pagemill.engine.plan import NewRow, Sample

    seen: list[bool] = []

    def draw(logits: torch.Tensor, peaks: torch.Tensor, draws: Any) -> torch.Tensor:
        seen.append(torch.equal(peaks, logits.amax(dim=-1)))
        return logits.argmax(dim=-1)

    monkeypatch.setattr("pagemill.engine.execution.sampling.sampler.draw", draw)
    params = SamplingParams(temperature=1.0, seed=3, logit_bias={7: 50.0})
    work = [SampleWork(Sample(0, 0, 3), NewRow(0, "r", 1, [1, 2, 3], 3, [], params, seed=3))]
    table = torch.ones(1, 16, dtype=torch.int64)
    Sampler((), draws_on_device=True).sample(torch.randn(1, 400), work, table)
    assert seen == [True]


_SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_SMALL),
        GemmaConfig(**_SMALL, head_dim=8, hidden_act="silu", hidden_activation="silu"),
        MistralConfig(**_SMALL, sliding_window=6),
        Phi3Config(**_SMALL),
        Qwen2Config(**_SMALL),
        Qwen3Config(**_SMALL, head_dim=16),
        SmolLM3Config(**_SMALL, no_rope_layers=[1, 1, 0]),
        Qwen3MoeConfig(**_SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        GptOssConfig(**_SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    ],
    ids=lambda config: config.model_type,
)
def test_fused_modules_compute_what_they_replace(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 or "norm" in name else parameter.normal_(std=0.1)
    ids, positions = torch.randint(VOCAB_SIZE, (1, 11)), torch.arange(11)[None]
    with torch.inference_mode():
        truth = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        model.config._attn_implementation = "pagemill_paged"
        monkeypatch.setattr(CudaBackend, "device", _CPU)
        CudaBackend().fuse(model, traits_of(model), torch.float32, LinearOptions())
        assert sum(isinstance(module, PreNormLayer) for module in model.modules()) == 3
        attention = model.model.layers[0].self_attn
        shape = (2, attention.num_kv_heads, 16, attention.head_dim)
        layers = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(3)]
        with attention_context(AttentionContext(_one_prompt(11), layers)):
            out = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-4)


def test_what_fusing_replaces_is_freed_at_once() -> None:
    """Not only when the garbage collector runs: on a GPU the KV pool could use that memory."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    merged = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    replaced = [
        weakref.ref(parameter)
        for name, parameter in model.named_parameters()
        if any(part in name for part in merged)
    ]
    assert len(replaced) == 2 * len(merged)
    gc.disable()
    try:
        CudaBackend().fuse(model, traits_of(model), torch.float32, LinearOptions())
        assert not any(parameter() is not None for parameter in replaced)
    finally:
        gc.enable()


def test_memory_that_loading_let_go_of_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, held = 2**30, 9 * 2**30

    def empty_cache() -> None:
        nonlocal held
        held = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib - held, 80 * gib))
    config = EngineConfig(model="echo", gpu_memory_utilization=0.5)
    shape = KVCacheShape(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float16)
    assert num_blocks_for(config, shape, CudaBackend()) == 20 * gib // shape.block_bytes


def _one_prompt(length: int) -> AttentionMetadata:
    return AttentionMetadata(
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        slot_mapping=16 + torch.arange(length),
        query_lens_host=[length],
        seq_lens_host=[length],
        num_decode_rows=0,
        max_query_len=length,
        max_seq_len=length,
    )


def test_only_covered_plans_are_replayed() -> None:
    from pagemill.engine.plan import RowWork, StepPlan

    graphs = DecodeGraphs(
        lambda _: torch.zeros(1), max_num_seqs=2, max_model_len=32, block_size=16, device=_CPU
    )
    assert graphs.covers(StepPlan(0, work=[RowWork(0, 4, 1), RowWork(1, 0, 1)]))
    assert not graphs.covers(StepPlan(0, work=[RowWork(0, 4, 2)]))
    assert not graphs.covers(StepPlan(0, work=[RowWork(row, 4, 1) for row in range(3)]))
    assert not graphs.covers(StepPlan(0, work=[RowWork(0, 0, 1, num_prompt_logprobs=1)]))
    assert not graphs.covers(StepPlan(0))
