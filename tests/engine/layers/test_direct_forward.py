"""The forward pass without the modules' Python compared with transformers' own, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.decoder_traits import LLAMA_DECODER
from pagemill.engine.layers.direct_forward import DirectForward
from pagemill.engine.layers.positions.rope import fix_frequencies
from pagemill.engine.layers.positions.rope_table import RotaryTable
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from tests.engine.layers.test_decoder_layer import (
    FAMILIES,
    fused_model,
    random_caches,
    step,
    traits_of,
    with_every_product,
)
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama

STEPS = (([1], [1], 0), ([1, 1, 1], [9, 1, 17], 0), ([1, 1, 6, 3], [4, 12, 6, 19], 2), ([9], [21], 0))
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.5] * 4,
    "original_max_position_embeddings": 16,
}


def positions_of(metadata: AttentionMetadata) -> torch.Tensor:
    """[num_tokens]; padded tokens have position 0."""
    ends = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    positions = [p for count, length in ends for p in range(length - count, length)]
    return torch.tensor(positions + [0] * (len(metadata.slot_mapping) - len(positions)))


def assert_same(
    model: Any,
    direct: DirectForward,
    metadata: AttentionMetadata,
    indices: list[int] | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    ids, positions = torch.randint(50, metadata.slot_mapping.shape), positions_of(metadata)
    caches = random_caches(model, dtype)
    theirs = [LayerCache(*(tensor.clone() for tensor in cache.tensors())) for cache in caches]
    index = None if indices is None else torch.tensor(indices)
    read = None if index is None else index.unique()
    with torch.inference_mode(), attention_context(AttentionContext(metadata, theirs, read)):
        expected = model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if index is None else index,
        ).logits[0]
    with torch.inference_mode():
        logits = direct.logits(ids, positions, caches, metadata, read, index)
    assert torch.isfinite(expected[: sum(metadata.query_lens_host)]).all()
    assert torch.equal(logits, expected)
    for cache, other in zip(caches, theirs, strict=True):
        for ours, others in zip(cache.tensors(), other.tensors(), strict=True):
            assert torch.equal(ours.view(torch.uint8), others.view(torch.uint8))


def direct_forward(model: Any) -> DirectForward:
    direct = DirectForward.from_module(model, traits_of(model))
    assert direct is not None
    return direct


@pytest.mark.slow
@with_every_product
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_in_every_family(family: str, kind: str) -> None:
    model = fused_model(family, kind)
    direct = direct_forward(model)
    for query_lens, seq_lens, num_padded in STEPS:
        metadata = step(query_lens, seq_lens, num_padded)
        assert_same(model, direct, metadata, None)
        assert_same(model, direct, metadata, [len(metadata.slot_mapping) - 1 - num_padded, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_same_logits_with_other_caches(dtype: torch.dtype) -> None:
    model = fused_model("qwen3", "int8")
    direct = direct_forward(model)
    for kind in (torch.float32, dtype):  # sequentially: the layers switch to other caches
        assert_same(model, direct, step([1, 1, 6], [9, 3, 15]), [2, 7], kind)


@pytest.mark.slow
def test_a_step_without_samples_fills_the_caches() -> None:
    model = fused_model("llama", "int8")
    metadata = step([6], [6])
    ids, positions = torch.randint(50, (6,)), positions_of(metadata)
    caches = random_caches(model)
    theirs = [LayerCache(*(tensor.clone() for tensor in cache.tensors())) for cache in caches]
    none, first = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        direct = direct_forward(model)
        assert len(direct.logits(ids, positions, caches, metadata, first, none)) == 0
        direct.logits(ids, positions, theirs, metadata, None, None)
    for cache, other in zip(caches, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("rope", [{}, {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 32}])  # fmt: skip
def test_the_table_holds_the_embeddings_own_numbers(rope: dict[str, Any]) -> None:
    settings = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"} | rope} if rope else {}
    config = AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=6, **settings)
    embedding = AutoModelForCausalLM.from_config(config.__class__(**config.to_dict() | {"num_hidden_layers": 1,
        "vocab_size": 8, "intermediate_size": 8})).model.rotary_emb  # fmt: skip
    table = RotaryTable(embedding)
    for length in (5, 3000, 40_000, 7):
        positions = torch.cat([torch.tensor([0, length - 1]), torch.randint(length, (31,))])
        cos, sin = (x[0] for x in embedding(torch.empty(0), positions[None]))
        half = cos.shape[1] // 2
        ours = table.rows(positions, length)
        assert ours[0].shape == cos.shape
        assert torch.equal(ours[0][:, :half], cos[:, :half])
        assert torch.equal(ours[1], sin[:, :half])


def test_models_with_more_to_them_keep_their_own_forward() -> None:
    model = fused_model("llama", "int8")
    assert DirectForward.from_module(model, traits_of(model)) is not None
    layer = model.model.layers[1]
    model.model.layers[1] = layer.source  # not compiled
    assert DirectForward.from_module(model, traits_of(model)) is None
    model.model.layers[1] = layer
    assert DirectForward.from_module(model, traits_of(model)) is not None
    model.config.num_hidden_layers -= 1  # transformers would stop before the last layer
    assert DirectForward.from_module(model, traits_of(model)) is None
    model.config.num_hidden_layers += 1
    for other in (
        replace(LLAMA_DECODER, is_plain=False),
        replace(LLAMA_DECODER, rotation="by_layer_type"),
        None,
    ):
        assert DirectForward.from_module(model, other) is None


def test_frequencies_that_depend_on_the_length_are_looked_up_once_they_are_fixed() -> None:
    scaled = {"rope_parameters": LONGROPE | {"rope_theta": 1e4}, "max_position_embeddings": 64}
    model = fused_model("llama", "int8", **scaled)
    assert DirectForward.from_module(model, traits_of(model)) is None
    fix_frequencies(model, 64)
    direct = direct_forward(model)
    for query_lens, seq_lens, num_padded in STEPS:
        assert_same(model, direct, step(query_lens, seq_lens, num_padded), None)


@pytest.mark.slow
def test_the_engine_says_the_same_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, samples of some rows, narrow vocabularies, prompt scores, and changing neighbors."""
    save_tiny_llama(tmp_path)
    prompts = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 5, 40, 90, 17)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=4, max_tokens=20, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=[5, 9, 11]),
    ]

    def run() -> list[Any]:
        options = {"num_kv_blocks": 200, "max_num_batched_tokens": 32, "quantization": "int8"}
        llm = LLM(model=str(tmp_path), skip_tokenizer_init=True, **options)
        found = llm.generate(prompts, params)
        return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found]

    calls = 0
    logits = DirectForward.logits

    def count(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return logits(*arguments)

    monkeypatch.setattr(DirectForward, "logits", count)
    ours = run()
    assert calls > 10
    monkeypatch.setattr(DirectForward, "from_module", lambda *_: None)
    assert run() == ours
