"""Every supported family, from a checkpoint on disk: greedy output equals transformers' full re-forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.execution.loader import SUPPORTED_MODEL_TYPES
from engine.llm import LLM
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 97
NUM_OUTPUT_TOKENS = 8
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2_LIKE = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA_LIKE),
    "llama tied": ("llama", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "mistral, a window shorter than the prompt": ("mistral", LLAMA_LIKE | {"sliding_window": 6}),
    "qwen2": ("qwen2", LLAMA_LIKE),
    "qwen3": ("qwen3", LLAMA_LIKE | {"head_dim": 32}),
    "gpt2": ("gpt2", GPT2_LIKE),
    "gpt_bigcode, one kv head": ("gpt_bigcode", GPT2_LIKE | {"multi_query": True}),
    "gpt_bigcode, all kv heads": ("gpt_bigcode", GPT2_LIKE | {"multi_query": False}),
    "gpt_neox": (
        "gpt_neox",
        {k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"} | {"rotary_pct": 0.25},
    ),
    "opt": ("opt", OPT_LIKE),
    "opt, as its 350m": ("opt", OPT_LIKE | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}
PROMPTS = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 2, 5, 9, 16, 17, 24)]


def make_model(model_type: str, settings: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(model_type, **(settings | NO_SPECIAL_TOKENS))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    # Wide weights: those of a fresh model would leave the best tokens almost tied.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(mean=1.0 if is_norm_weight else 0.0, std=0.2)
    return model


def write_checkpoint(directory: Path, model_type: str = "llama", **settings: Any) -> Path:
    make_model(model_type, LLAMA_LIKE | settings).save_pretrained(directory)
    return directory


@torch.inference_mode()
def complete(model: Any, prompt: list[int]) -> list[int]:
    """Greedy, everything computed again for every token."""
    tokens = list(prompt)
    for _ in range(NUM_OUTPUT_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def run(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_all_supported_families_are_tested() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_equals_a_full_forward_of_transformers(family: str, tmp_path: Path) -> None:
    model_type, settings = FAMILIES[family]
    model = make_model(model_type, settings)
    model.save_pretrained(tmp_path)
    expected = [complete(model, prompt) for prompt in PROMPTS]
    assert len({tuple(output) for output in expected}) > 1
    llm = LLM(str(tmp_path), num_kv_blocks=64, block_size=4, max_num_batched_tokens=5, num_threads=1)
    assert run(llm) == expected
    assert run(llm) == expected, "with the prompts in the prefix cache"
    llm.engine.check_integrity()


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **(LLAMA_LIKE | NO_SPECIAL_TOKENS)).save_pretrained(tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "num_kv_blocks": 64, "num_threads": 1}
    first, again, other = (run(LLM(str(tmp_path), seed=seed, **options)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors weights"):
        LLM(str(tmp_path))


def test_missing_directory_is_named() -> None:
    with pytest.raises(ModelLoadError, match="no model at '/nowhere/at/all': give a Hugging Face model"):
        LLM("/nowhere/at/all")


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        LLM(str(tmp_path))


def test_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_unsupported_model_type_lists_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelLoadError, match=r"'bert' is not supported; supported: .*llama"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_neighbour_is_refused(rope_type: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    } | factors
    AutoConfig.for_model("llama", **(LLAMA_LIKE | {"rope_parameters": rope})).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"rope type '{rope_type}' is not supported"):
        LLM(str(tmp_path), load_format="dummy")


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="can't load the weights in"):
        LLM(str(tmp_path))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    make_model("llama", LLAMA_LIKE | {"intermediate_size": 80}).config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="can't load the weights in"):
        LLM(str(tmp_path))


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    make_model("llama", LLAMA_LIKE | {"num_hidden_layers": 3}).config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="can't load the weights in"):
        LLM(str(tmp_path))
