"""Adapters of other families, of fused layers and of quantized models, against PEFT's merged models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pagemill.engine.errors import AdapterError
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.adapters.test_exactness import NUM_TOKENS, PROMPTS, assert_as_merged, generated
from tests.engine.adapters.trained import Trained, merged_model, save_adapter
from tests.engine.models.families import remote_cases
from tests.engine.models.families.mixture_cases import MIXTURE_CASES
from tests.engine.models.generic.tiny_configs import tiny_config
from tests.engine.models.generic.trial import build, randomise
from tests.engine.models.quantized import checkpoints

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "phi3": ({"num_key_value_heads": 2}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "qwen3": ({"num_key_value_heads": 2, "head_dim": 8}, ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")),
    "granite": ({"num_key_value_heads": 2}, ("q_proj", "v_proj", "gate_proj", "down_proj")),
    "falcon": ({"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False}, FUSED),
    "bloom": ({"n_head": 4, "n_layer": 2}, FUSED),
    "gpt_neox": ({}, FUSED),
    "qwen2_moe": (
        {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64},
        ("q_proj", "v_proj", "o_proj", "shared_expert.gate_proj", "shared_expert.down_proj"),
    ),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")),
    "mpt": (
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
        ("Wqkv", "out_proj", "up_proj", "down_proj"),
    ),
    "gptj": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
        ("q_proj", "v_proj", "fc_in", "fc_out"),
    ),
}  # fmt: skip
RECURRENT: dict[str, tuple[str, ...]] = {
    "lfm2": ("in_proj", "out_proj", "q_proj", "w1"),
    "mamba": ("in_proj", "x_proj"),
    "qwen3_5_text": ("in_proj_qkv", "in_proj_z", "q_proj", "up_proj"),
    "zaya": ("q_proj", "v_proj_delayed", "o_proj"),
}
"""Their layers compute rows of several lengths alternately."""
QUICK = ("phi3", "falcon", "bloom")


def save_tiny(kind: str, fields: dict[str, Any], directory: Path) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | fields)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(std=0.4)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in FAMILIES]
)
def test_a_family(kind: str, tmp_path: Path) -> None:
    fields, targets = FAMILIES[kind]
    model = save_tiny(kind, fields, tmp_path / "model")
    adapters = {
        name: save_adapter(model, tmp_path / name, Trained(rank=rank, targets=targets, seed=rank, std=0.8))
        for name, rank in (("a", 8), ("b", 16))
    }
    assert_as_merged(model, adapters)


def test_a_decoder_whose_head_has_linear_layers(tmp_path: Path) -> None:
    """The head only sees the rows that are sampled, so its layers cannot have adapters."""
    model = tmp_path / "model"
    module = build("modernbert-decoder", tiny_config("modernbert-decoder", 0))
    randomise(module, 5)
    module.save_pretrained(model)
    adapters = {
        name: save_adapter(model, tmp_path / name, Trained(rank=rank, targets=("Wi",), seed=rank, std=0.8))
        for name, rank in (("a", 8), ("b", 16))
    }
    assert_as_merged(model, adapters)
    head = save_adapter(model, tmp_path / "head", Trained(rank=8, targets=("dense",)))
    with pytest.raises(AdapterError, match=r"changes lm_head\.dense, which is not supported"):
        LLM(str(model), adapters=(f"head={head}",), skip_tokenizer_init=True, num_kv_blocks=32)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_model(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    module = build(kind, tiny_config(kind, 0))
    randomise(module, 5)
    module.save_pretrained(model)
    adapters = {
        name: save_adapter(
            model, tmp_path / name, Trained(rank=rank, targets=RECURRENT[kind], seed=rank, std=0.8)
        )
        for name, rank in (("a", 8), ("b", 16))
    }
    assert_as_merged(model, adapters)


@pytest.mark.parametrize(
    ("case", "path", "shape"),
    [
        (remote_cases.baichuan_7b, "model.layers.1.self_attn.W_pack", "W_pack"),
        (lambda: remote_cases.internlm2(False), "model.layers.0.attention.wqkv", "wqkv"),
    ],
    ids=["baichuan", "internlm2"],
)
def test_layers_that_the_model_is_not_run_with(case: Any, path: str, shape: str, tmp_path: Path) -> None:
    checkpoint = case()
    model = checkpoint.write(tmp_path / "model")
    weight = checkpoint.tensors[f"{path}.weight"]
    torch.manual_seed(2)
    a, b = torch.randn(8, weight.shape[1]), 0.3 * torch.randn(len(weight), 8)
    folder = tmp_path / "adapter"
    folder.mkdir()
    names = {"A": a, "B": b}
    save_file(
        {f"base_model.model.{path}.lora_{half}.weight": tensor for half, tensor in names.items()},
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": [shape],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = tmp_path / "merged"
    checkpoint.write(merged)
    file = next(merged.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[f"{path}.weight"] += b @ a
    save_file(tensors, file, metadata={"format": "pt"})
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 64, "dtype": "float32"}
    prompts = [list(prompt) for prompt in PROMPTS]
    wanted = generated(LLM(str(merged), **options), prompts, [None] * len(prompts))
    llm = LLM(str(model), adapters=(f"x={folder}",), **options)
    assert generated(llm, prompts, ["x"] * len(prompts)) == wanted
    assert generated(llm, prompts, [None] * len(prompts)) != wanted


@pytest.mark.parametrize(
    "form", [checkpoints.gptq(), checkpoints.awq(), checkpoints.packed()],
    ids=["gptq", "awq", "compressed W4A16"],
)  # fmt: skip
def test_a_quantized_checkpoint(form: checkpoints.Format, tmp_path: Path) -> None:
    stored, widened = checkpoints.write_pair(tmp_path, form)
    adapters = {
        name: save_adapter(widened, tmp_path / name, Trained(rank=rank, seed=rank, std=1.0))
        for name, rank in (("a", 8), ("b", 32))
    }
    llm = LLM(
        str(stored),
        adapters=tuple(f"{name}={path}" for name, path in adapters.items()),
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    prompts, names = [list(PROMPTS[0])] * 3, [None, "a", "b"]
    found = generated(llm, prompts, names)
    for name, tokens in zip(names, found, strict=True):
        merged = merged_model(widened, adapters.get(name or ""))
        ids = list(PROMPTS[0])
        for token in tokens:
            with torch.inference_mode():
                logits = merged(torch.tensor([ids])).logits[0, -1]
            assert float(logits.max() - logits[token]) < 1e-3
            ids.append(token)
    assert len(set(map(tuple, found))) == 3


def test_int8_weights(tmp_path: Path) -> None:
    from tests.engine.tiny_model import save_tiny_llama

    save_tiny_llama(tmp_path / "llama", std=0.1)
    adapter = save_adapter(tmp_path / "llama", tmp_path / "a", Trained(std=0.5))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 64}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def scores(llm: LLM, name: str | None) -> torch.Tensor:
        (output,) = llm.generate([list(PROMPTS[2])], params, adapter=name, use_tqdm=False)
        assert output.prompt_logprobs is not None
        return torch.tensor([one.logprob for one in output.prompt_logprobs[1:] if one is not None])

    exact = LLM(str(tmp_path / "llama"), adapters=(f"a={adapter}",), **options)
    rounded = LLM(str(tmp_path / "llama"), adapters=(f"a={adapter}",), quantization="int8", **options)
    change = (scores(exact, "a") - scores(exact, None)).abs().mean()
    assert (scores(rounded, "a") - scores(exact, "a")).abs().mean() < change / 5


def test_rows_without_an_adapter_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """In a batch with adapters the compiled layers are not used; this must not affect the other rows."""
    from tests.engine.tiny_model import save_tiny_llama

    save_tiny_llama(tmp_path / "llama")
    adapter = save_adapter(tmp_path / "llama", tmp_path / "a")
    llm = LLM(
        str(tmp_path / "llama"), adapters=(f"a={adapter}",), skip_tokenizer_init=True, num_kv_blocks=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert "decoder layers" in llm.engine.model_parts.partition(";")[0], "nothing is compiled here"
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    prompts = [list(prompt) for prompt in PROMPTS] * 2

    def plain_rows(names: list[str | None]) -> list[Any]:
        outputs = llm.generate(prompts, params, adapter=names, use_tqdm=False)
        return [output.outputs[0].logprobs for output in outputs[:3]]

    alone = plain_rows([None] * 6)
    assert plain_rows([None] * 3 + ["a"] * 3) == alone


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["qwen3_moe, a dense layer between"]()
    model = checkpoint.write(tmp_path / "model")
    path = "model.layers.0.mlp.experts.1.gate_proj"
    folder = save_adapter(model, tmp_path / "adapter", Trained(targets=("q_proj",)))
    weights = folder / "adapter_model.safetensors"
    change = {"A": torch.zeros(8, 64), "B": torch.zeros(32, 8)}
    experts = {f"base_model.model.{path}.lora_{half}.weight": matrix for half, matrix in change.items()}
    save_file({name: tensor.clone() for name, tensor in load_file(weights).items()} | experts, weights)
    with pytest.raises(
        AdapterError, match=f"the adapter changes {path}: adapters of experts are not supported"
    ):
        LLM(str(model), adapters=(f"a={folder}",), skip_tokenizer_init=True, num_kv_blocks=32, num_threads=1)
