"""Every decoder on CUDA's path, without a GPU: a step does not mix devices or wait.

Models are built, rehearsed, captured and run as on a GPU, on torch's `meta` device (`meta_gpu.py`). Each
finding of that file's modes is a failure, except where `EXCEPTIONS` states a reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from pagemill.engine.builder import _build_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.execution.cuda_graphs import DecodeGraphs
from pagemill.engine.parts import EngineParts
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.adapters.trained import save_adapter
from tests.engine.execution.meta_gpu import MetaCuda, Watch, meta_gpu
from tests.engine.models.generic.sweep import stored_outcomes
from tests.engine.models.generic.tiny_configs import VARIANTS, tiny_config
from tests.engine.models.generic.trial import build
from tests.engine.models.quantized.checkpoints import FORMATS, write_pair
from tests.engine.models.test_families import CASES

pytestmark = pytest.mark.slow
EXACT = [kind for kind, outcome in stored_outcomes()[1].items() if outcome.refusal is None]
REPRESENTATIVES = (
    "bert", "cohere2", "deepseek_v3", "diffllama", "falcon_h1", "gemma3n_text", "gemma4_text", "lfm2", "llama4_text",
    "longcat_flash", "mamba", "mamba2", "minicpm3", "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma", "xmod",
    "zamba2", "zaya",
)  # fmt: skip
"""The generic types that `make check` runs: one for each kind of layer."""
FAMILIES = (
    "bloom", "falcon, as its 7b", "gemma3", "gpt_oss", "mpt", "phimoe", "qwen3_moe, a dense layer between",
)  # fmt: skip
"""The same for the registered families' cases."""
_LOOPS = "transformers' own experts, of a layout that is not replaced, loop over those that were chosen"
EXCEPTIONS = {
    "dbrx": _LOOPS,
    "longcat_flash": _LOOPS,
    "xmod": "each layer selects the tokens of a language by a mask",
}
"""Types whose steps wait for the GPU, and why. They run without CUDA graphs."""
UNSEEN = {"jetmoe": "its experts divide rows by numbers that they read back, which do not exist here"}
"""Types that cannot run without values. Their steps wait for the GPU."""

_MODEL: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "bfloat16", "verify": False,
    "max_num_seqs": 2, "max_num_batched_tokens": 24, "max_model_len": 64, "num_kv_blocks": 60,
}  # fmt: skip
_GREEDY, _DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.9, logprobs=2)


def _row(number: int, length: int, params: SamplingParams, groups: int, **fields: Any) -> NewRow:
    tokens = list(range(3, 3 + length))
    return NewRow(number, str(number), 0, tokens, length, [1] * (4 * groups), params, seed=1, **fields)


def _plans(parts: EngineParts, **fields: Any) -> list[StepPlan]:
    """Return prompts, a decode step, both kinds of rows together with a copied state, and scored prompts."""
    groups, has_states = len(parts.limits.kv_windows), parts.limits.state_bytes > 0
    new = [_row(0, 10, _GREEDY, groups, **fields), _row(1, 5, _DRAWN, groups)]
    scored = [RowWork(0, 0, 10, num_prompt_logprobs=2), RowWork(1, 0, 5, reads=((3, (4, 5)), (4, (6,))))]
    plans = [
        StepPlan(1, new_rows=new, work=[RowWork(0, 0, 10), RowWork(1, 0, 5)],
                 samples=[Sample(0, 9, 10), Sample(1, 14, 5)]),
        StepPlan(2, work=[RowWork(0, 10, 1), RowWork(1, 5, 1)], samples=[Sample(0, 0, 11), Sample(1, 1, 6)]),
        StepPlan(3, work=[RowWork(0, 11, 1), RowWork(1, 6, 3)], samples=[Sample(0, 0, 12)],
                 state_copies=[(0, 1)] if has_states else []),
        StepPlan(4, work=scored, samples=[]),
    ]  # fmt: skip
    for plan in plans:
        plan.has_adapters = bool(fields)
    return plans


def _build(directory: Path, device: MetaCuda, options: dict[str, Any]) -> EngineParts:
    return _build_model(device, EngineConfig(model=str(directory), **(_MODEL | options)), None)


def _launch(parts: EngineParts, plans: list[StepPlan], watch: Watch) -> None:
    for plan in plans:
        with watch.during("step"):
            parts.executor.launch(plan).wait()


def _run(directory: Path, capability: tuple[int, int] = (9, 0), **options: Any) -> Watch:
    """Serve a checkpoint: its weights are read on the host and moved, and so are a module's other tensors."""
    with meta_gpu(capability) as (device, watch):
        parts = _build(directory, device, options)
        executor: Any = parts.executor
        is_captured = isinstance(executor._forward_passes[0], DecodeGraphs)
        assert is_captured == (parts.limits.state_bytes == 0)
        _launch(parts, _plans(parts), watch)
    return watch


def _some(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("model_type", _some(EXACT, REPRESENTATIVES))
def test_generic_types(model_type: str, tmp_path: Path) -> None:
    if model_type in UNSEEN:
        pytest.skip(UNSEEN[model_type])
    variants = VARIANTS[:1] if model_type in REPRESENTATIVES else VARIANTS
    for variant in variants:
        build(model_type, tiny_config(model_type, variant)).save_pretrained(tmp_path)
        watch = _run(tmp_path)
        assert bool(watch.findings) == (model_type in EXCEPTIONS), watch.report()


@pytest.mark.parametrize("case", _some(CASES, FAMILIES))
def test_registered_families(case: str, tmp_path: Path) -> None:
    checkpoint = CASES[case]()
    watch = _run(checkpoint.write(tmp_path), **checkpoint.options)
    assert not watch.findings, watch.report()


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8"}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"},
        {"dtype": "float16"}, {"dtype": "float32"}, {"pad_to_bucket": True}, {"load_format": "dummy"},
    ],
    ids=str,
)  # fmt: skip
def test_settings(options: dict[str, Any], tmp_path: Path) -> None:
    watch = _run(CASES["llama"]().write(tmp_path), **options)
    assert not watch.findings, watch.report()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_without_torchs_grouped_product(dtype: str, tmp_path: Path) -> None:
    checkpoint = CASES["qwen3_moe, a dense layer between"]()
    watch = _run(checkpoint.write(tmp_path), (8, 0), **(checkpoint.options | {"dtype": dtype}))
    assert not watch.findings, watch.report()


def test_the_comparison_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first startup of a model without a family: it may read back, but does not mix devices."""
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    build("cohere2", tiny_config("cohere2", 0)).save_pretrained(tmp_path)
    watch = _run(tmp_path, verify=True)
    assert not watch.findings, watch.report()


_SAMPLING = {
    "greedy": _GREEDY,
    "plain": SamplingParams(temperature=0.9),
    "filters": SamplingParams(temperature=0.9, top_p=0.9, top_k=5, min_p=0.1),
    "penalties": SamplingParams(presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1),
    "bias and bad words": SamplingParams(logit_bias={3: 1.0, 4: -2.0}),
    "min_tokens": SamplingParams(min_tokens=5, stop_token_ids=[7]),
    "allowed": SamplingParams(allowed_token_ids=[3, 4, 5]),
    "logprobs": SamplingParams(logprobs=3),
}


def test_sampling(tmp_path: Path) -> None:
    """Each kind of row and of sample, in decode steps and in prompts, and a step's copies of blocks."""
    bad = ((4, 5), (6,))
    plans = []
    for params in _SAMPLING.values():
        new = _row(0, 10, params, 1, bad_word_ids=bad if params.logit_bias else ())
        plans += [
            StepPlan(1, new_rows=[new], work=[RowWork(0, 0, 10)], samples=[Sample(0, 9, 10)]),
            StepPlan(2, work=[RowWork(0, 10, 1, new_block_ids=[2])], samples=[Sample(0, 0, 11)]),
        ]
    decode = [RowWork(0, 11, 1)]
    plans += [
        StepPlan(3, work=decode, samples=[Sample(0, 0, 12, token_mask=bytes([255] * 13))]),
        StepPlan(4, work=decode, samples=[Sample(0, 0, 12, allowed_token_ids=[1, 2])]),
        StepPlan(5, work=decode, samples=[Sample(0, 0, 12, num_candidates=4)]),
        StepPlan(6, work=[RowWork(0, 12, 1, forced_token_ids=((12, 3),))], samples=[Sample(0, 0, 13)]),
        StepPlan(7, work=decode, block_copies=[(1, 2)], samples=[Sample(0, 0, 12)]),
        StepPlan(8, work=decode, host_stores=[(1, 0), (2, 1)], samples=[Sample(0, 0, 12)]),
        StepPlan(9, work=decode, host_loads=[(0, 3)], samples=[Sample(0, 0, 12)]),
        StepPlan(10, work=[RowWork(0, 12, 4)], samples=[]),
    ]
    with meta_gpu() as (device, watch):
        parts = _build(CASES["llama"]().write(tmp_path), device, {"host_cache_gib": 0.01})
        _launch(parts, plans, watch)
    assert not watch.findings, watch.report()


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_adapters(quantization: str | None, tmp_path: Path) -> None:
    model = CASES["llama"]().write(tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter")
    options = {"adapters": (f"one={adapter}",), "quantization": quantization}
    with meta_gpu() as (device, watch):
        parts = _build(model, device, options)
        _launch(parts, _plans(parts, adapter_slot=0), watch)
    assert not watch.findings, watch.report()


@pytest.mark.parametrize("name", _some(FORMATS, ("awq", "fp8-rows", "nvfp4")))
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, FORMATS[name][0])
    watch = _run(stored, max_num_seqs=8, max_num_batched_tokens=300)  # weights are widened for many rows
    assert not watch.findings, watch.report()
