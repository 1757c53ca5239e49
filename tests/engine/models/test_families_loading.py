"""Unsupported checkpoints are rejected at startup, with their name; bundled code is never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.models.checkpoint import weight_files
from pagemill.engine.models.families.registry import SUPPORTED_MODEL_TYPES
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.native_cases import BLOOM, GEMMA3, LLAMA, MPT, MPT_ATTENTION, write_llama
from tests.engine.models.families.remote_cases import baichuan_7b, internlm, qwen
from tests.engine.models.families.tiny import PROMPTS, TinyCheckpoint, native_checkpoint, write_tensors

Change = Callable[[dict[str, torch.Tensor]], object]


def load(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), num_threads=1, **({"num_kv_blocks": 64, "block_size": 4} | options))


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def rewrite(directory: Path, change: Change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    write_tensors(directory, tensors)


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def llama_but(**fields: Any) -> Callable[[Path], object]:
    """A checkpoint with another value in its configuration."""
    return lambda directory: edit_config(write_llama(directory), **fields)


def beside_llama(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A checkpoint with a file of other content."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda directory: (write_llama(directory) / name).write_bytes(data)


def cut_weights(directory: Path) -> None:
    weights = write_llama(directory) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def shards(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Three files, and a change of the second one."""

    def write(directory: Path) -> None:
        native_checkpoint(LLAMA).write(directory, num_shards=3)
        change(directory / "model-00002-of-00003.safetensors")

    return write


def broken_index(index: str) -> Callable[[Path], object]:
    def write(directory: Path) -> None:
        native_checkpoint(LLAMA).write(directory, num_shards=2)
        (directory / "model.safetensors.index.json").write_text(index)

    return write


def one_bias_less(directory: Path) -> None:
    write_llama(directory, attention_bias=True)
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))


def half_a_pair(directory: Path) -> None:
    checkpoint = qwen()
    del checkpoint.tensors["transformer.h.1.mlp.w2.weight"]
    checkpoint.write(directory)


REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("no config", lambda directory: None, r"config\.json is missing"),
    *((f"config {content!r}", lambda d, c=content: (d / "config.json").write_bytes(c), r"can't read .*config\.json")
      for content in (b"{", b"[1]", b"\xff\xfe", b"")),
    ("a wrong type", llama_but(hidden_size="sixty-four"), r"can't read .*config\.json.*hidden_size"),
    *((f"generation_config {content}", beside_llama("generation_config.json", content), "can't read eos_token_id")
      for content in ("{", '{"eos_token_id": "end"}', '{"eos_token_id": [1, null]}', "[]")),
    ("tokenizer", beside_llama("tokenizer.json", '{"version": "1.0"'), "can't load the tokenizer"),
    ("another kind of head", llama_but(architectures=["LlamaForSequenceClassification"]),
     "'LlamaForSequenceClassification' of model type 'llama' is not"),
    ("truncated", cut_weights, r"can't load the weights in .*model\.safetensors"),
    ("no safetensors at all", beside_llama("model.safetensors", "not what it says"),
     r"can't load the weights in .*model\.safetensors"),
    ("a missing shard", shards(lambda shard: shard.unlink()), "1 of 3 files are missing, model-00002-of-00003"),
    ("a truncated shard", shards(lambda shard: shard.write_bytes(shard.read_bytes()[:200])), "model-00002-of-00003"),
    *((f"index {index}", broken_index(index), r"can't read .*index\.json")
      for index in ("{", "{}", '{"weight_map": []}')),
    ("another shape", llama_but(intermediate_size=80), r"has shape \[.*\], config\.json asks for \[.*80.*\]"),
    ("a packed tensor of another shape",
     lambda directory: edit_config(baichuan_7b().write(directory), num_attention_heads=8, hidden_size=128),
     "can't load the weights in"),
    ("fewer layers than configured", llama_but(num_hidden_layers=3), r"9 tensors are missing, model\.layers\.2\."),
    ("more layers than configured", llama_but(num_hidden_layers=1),
     r"9 tensors have no place in the model, model\.layers\.1\."),
    ("biases that the configuration denies",
     lambda directory: edit_config(write_llama(directory, attention_bias=True), attention_bias=False),
     "8 tensors have no place in the model"),
    ("a bias less", one_bias_less, r"1 tensors are missing, model\.layers\.1\.self_attn\.k_proj\.bias"),
    ("half of a renamed pair", half_a_pair, r"missing, model\.layers\.1\.mlp\.gate_proj"),
    ("untied without a head",
     lambda directory: edit_config(write_llama(directory, tie_word_embeddings=True), tie_word_embeddings=False),
     r"1 tensors are missing, lm_head\.weight"),
]  # fmt: skip
REFUSED_CONFIGS: list[tuple[dict[str, Any] | Callable[[], dict[str, Any]], str]] = [
    (LLAMA | {"head_dim": 16, "num_attention_heads": 0}, r"can't read .*config\.json"),
    (LLAMA | {"head_dim": 16, "num_hidden_layers": -1}, "num_hidden_layers is -1"),
    (LLAMA | {"head_dim": 16, "num_key_value_heads": 3}, "4 heads don't share 3 KV heads evenly"),
    *((MPT | fields, f"MPT with .*{message}.* is not supported") for fields, message in (
        # Settings that transformers would ignore.
        ({"attn_config": MPT_ATTENTION | {"alibi": False}}, "alibi=False"),
        ({"attn_config": MPT_ATTENTION | {"qk_ln": True}}, "qk_ln=True"),
        ({"attn_config": MPT_ATTENTION | {"attn_type": "multiquery_attention"}}, "multiquery_attention"),
        ({"no_bias": False}, "no_bias=False"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale="),
        ({"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
    )),
    *((lambda fields=fields: qwen().config | fields, r"Qwen with .* is not supported")
      for fields in ({"no_bias": False}, {"rotary_pct": 0.5})),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (lambda: {name: value for name, value in internlm(bias=True).config.items() if name != "hidden_size"},
     "'internlm' lacks hidden_size"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "message"), [pytest.param(write, message, id=name) for name, write, message in REFUSED]
)
def test_a_checkpoint_that_is_refused(write: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("config", "message"), REFUSED_CONFIGS)
def test_a_configuration_that_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config() if callable(config) else config))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format="dummy")


class TestDirectory:
    def test_missing_directory_is_named(self) -> None:
        with pytest.raises(ModelLoadError, match="no model at '/nowhere/at/all': give a folder"):
            LLM("/nowhere/at/all")

    @pytest.mark.slow
    def test_dummy_weights_need_only_a_config(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        first, again, other = (generate(load(tmp_path, load_format="dummy", seed=seed)) for seed in (0, 0, 1))
        assert first == again
        assert first != other
        with pytest.raises(
            ModelLoadError, match=r"has no weights \(\*\.safetensors or pytorch_model\*\.bin\)"
        ):
            load(tmp_path)

    @pytest.mark.parametrize("config", [BLOOM, MPT | {"attn_config": MPT_ATTENTION}], ids=["bloom", "mpt"])
    def test_dummy_weights_without_the_attention_interface(
        self, config: dict[str, Any], tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert all(len(output) == 4 for output in generate(load(tmp_path, load_format="dummy")))


class TestArchitecture:
    def test_unsupported_model_type_says_why(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "t5", "architectures": ["T5Model"]}')
        with pytest.raises(ModelLoadError) as refusal:
            LLM(str(tmp_path))
        assert "model type 't5' (T5Model) is not supported" in str(refusal.value)
        assert "it is an encoder-decoder; only decoders are run" in str(refusal.value)

    def test_no_model_type(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(
            ModelLoadError, match=r"model type None is not supported; supported: .*llama"
        ) as refusal:
            LLM(str(tmp_path))
        assert all(kind in str(refusal.value) for kind in SUPPORTED_MODEL_TYPES)


class TestWeights:
    def test_stale_index_beside_a_whole_file(self, tmp_path: Path) -> None:
        native_checkpoint(LLAMA).write(tmp_path, num_shards=3)
        for shard in tmp_path.glob("model-*.safetensors"):
            shard.unlink()
        (tmp_path / "model.safetensors").touch()
        assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]

    @pytest.mark.parametrize("has_shards", [True, False])
    def test_a_whole_file_replaces_indexed_ones(self, has_shards: bool, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
        (tmp_path / "model.safetensors").touch()
        if has_shards:
            (tmp_path / "model-1.safetensors").touch()
        assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]

    def test_a_value_head_beside_the_model_changes_nothing(self, tmp_path: Path) -> None:
        expected = generate(load(write_llama(tmp_path)))
        rewrite(tmp_path, lambda tensors: tensors.update({"v_head.summary.weight": torch.ones(1, 64)}))
        assert generate(load(tmp_path)) == expected

    @pytest.mark.parametrize("tied", [True, False])
    def test_untied_head_is_used_whatever_the_configuration_says(self, tied: bool, tmp_path: Path) -> None:
        expected = generate(load(write_llama(tmp_path, tie_word_embeddings=False)))
        edit_config(tmp_path, tie_word_embeddings=tied)
        assert generate(load(tmp_path)) == expected

    def test_tied_head_saved_all_the_same(self, tmp_path: Path) -> None:
        expected = generate(load(write_llama(tmp_path, tie_word_embeddings=True)))
        rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        assert generate(load(tmp_path)) == expected

    def test_files_of_others_beside_the_weights(self, tmp_path: Path) -> None:
        checkpoint = native_checkpoint(LLAMA)
        expected = generate(load(checkpoint.write(tmp_path / "plain")))
        directory = checkpoint.write(tmp_path / "beside", num_shards=2)
        write_tensors(tmp_path, {"anything": torch.ones(1)})
        (tmp_path / "model.safetensors").rename(directory / "consolidated.safetensors")
        assert generate(load(directory)) == expected


class TestRemoteCode:
    """A file that leaves a mark if it is run."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        checkpoint = baichuan_7b()
        auto_map = {
            "AutoConfig": "configuration_baichuan.BaichuanConfig",
            "AutoModelForCausalLM": "modeling_baichuan.BaiChuanForCausalLM",
        }
        directory = replace(checkpoint, config=checkpoint.config | {"auto_map": auto_map}).write(
            tmp_path / "model"
        )
        for name in ("configuration_baichuan", "modeling_baichuan", "tokenization_baichuan"):
            (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
        return directory

    def test_models_code_is_not_run(self, directory: Path) -> None:
        assert len(generate(load(directory))) == len(PROMPTS)
        assert not (directory.parent / "ran").exists()

    def write_remote_tokenizer(self, directory: Path) -> None:
        auto_map = {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}
        config = {"tokenizer_class": "BaichuanTokenizer", "auto_map": auto_map}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))

    def test_tokenizers_code_is_not_run(self, directory: Path) -> None:
        self.write_remote_tokenizer(directory)
        with pytest.raises(ModelLoadError, match=r"BaichuanTokenizer is code .*skip_tokenizer_init"):
            load(directory)
        assert len(generate(load(directory, skip_tokenizer_init=True))) == len(PROMPTS)
        assert not (directory.parent / "ran").exists()

    def test_tokenizer_json_stands_in_for_a_tokenizer_of_code(self, directory: Path) -> None:
        self.write_remote_tokenizer(directory)
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(directory / "tokenizer.json"))
        llm = load(directory)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        from_text = llm.generate("a b c", params, use_tqdm=False)[0]
        assert from_text.prompt_token_ids == [0, 1, 2]
        from_ids = llm.generate([[0, 1, 2]], params, use_tqdm=False)[0]
        assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids
        assert not (directory.parent / "ran").exists()


def test_half_precision_checkpoint_in_full_precision(tmp_path: Path) -> None:
    """bf16 on disk, fp32 on the CPU: the values are those on disk."""
    checkpoint = native_checkpoint(LLAMA)
    rounded = {name: tensor.bfloat16() for name, tensor in checkpoint.tensors.items()}
    half = TinyCheckpoint(checkpoint.config | {"torch_dtype": "bfloat16"}, rounded, checkpoint.logits)
    exact = replace(half, tensors={name: tensor.float() for name, tensor in rounded.items()})
    directories = half.write(tmp_path / "half"), exact.write(tmp_path / "exact")
    ours, expected = (generate(load(directory, dtype="float32")) for directory in directories)
    assert ours == expected
