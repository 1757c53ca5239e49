"""GGUF files: gguf's own values under transformers' names, and one line for damaged content."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from benchmarks.dense import dense_directory
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.models.checkpoint import (
    check_header,
    read_dense,
    read_scheme,
    read_tensors,
    weight_files,
)
from pagemill.engine.models.directory import check_model, model_directory
from pagemill.engine.models.formats.gguf import SOURCE
from pagemill.engine.sampling_params import SamplingParams
from tests.conftest import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 256, 2, 4, 2, 300
# One for each matrix of the file: 7 in a layer, the embedding and the head.
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K,
         Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.Q8_0, Kind.IQ4_XS)  # fmt: skip
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path / "cache"))


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The row order of queries and keys in llama.cpp."""
    return weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def restored(weights: np.ndarray, heads: int) -> np.ndarray:
    return weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def byte_level_vocabulary() -> list[str]:
    from pagemill.engine.text.byte_level import byte_characters

    return [*byte_characters(), "ab", *(f"<|extra_{n}|>" for n in range(VOCAB - 257))]


SIZES: dict[str, Any] = {"block_count": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS}


def begin(file: Path, architecture: str, pre: str, sizes: dict[str, Any]) -> gguf.GGUFWriter:
    """A file with the fields that both architectures have; `pre` splits its texts."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(sizes["block_count"])
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(byte_level_vocabulary())
    writer.add_token_types([1] * 257 + [3] * (VOCAB - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    file: Path, *, kinds: tuple[Kind, ...] = (Kind.F32,), architecture: str = "llama",
    change: Callable[[dict[str, Any]], object] = lambda fields: None,
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None, leave_out: str = "", surplus: str = "",
) -> dict[str, tuple[np.ndarray, Kind]]:  # fmt: skip
    """A tiny random LLaMA as llama.cpp writes it; returns the bytes of each tensor and their kind."""
    random = np.random.default_rng(0)
    fields = {**SIZES, "vocab": VOCAB}
    change(fields)
    writer = begin(file, architecture, "llama-bpe", fields)
    writer.add_vocab_size(fields["vocab"])
    writer.add_bos_token_id(257)
    add(writer)
    stored: dict[str, tuple[np.ndarray, Kind]] = {}

    def matrix(name: str, rows: int, heads: int = 0) -> None:
        kind = kinds[sum(1 for data, _ in stored.values() if data.ndim == 2) % len(kinds)]
        weights = (random.standard_normal((rows, HIDDEN)) * 0.2).astype(np.float32)
        if heads:
            weights = permuted(weights, heads)
        try:
            data = gguf.quantize(weights, kind)
        except NotImplementedError:  # only gguf can read it: any bytes that do not produce an infinite scale
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = random.integers(0, 256, (rows, HIDDEN // block * size), dtype=np.uint8) & 0xBF
        if name != leave_out:
            writer.add_tensor(name, data, raw_dtype=kind)
        stored[name] = data, kind

    def vector(name: str) -> None:
        data = (1 + random.standard_normal(HIDDEN) * 0.2).astype(np.float32)
        writer.add_tensor(name, data)
        stored[name] = data, Kind.F32

    matrix("token_embd.weight", VOCAB)
    for layer in range(LAYERS):
        for name in NAMES:
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name, 0)
            rows = HIDDEN // HEADS * KV_HEADS if name in ("attn_k", "attn_v") else HIDDEN
            matrix(f"blk.{layer}.{name}.weight", rows, heads)
        vector(f"blk.{layer}.attn_norm.weight")
        vector(f"blk.{layer}.ffn_norm.weight")
    matrix("output.weight", VOCAB)
    vector("output_norm.weight")
    if surplus:
        vector(surplus)
    finish(writer)
    return stored


def converted_name(name: str) -> str:
    fixed = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
    stem = name.removesuffix(".weight")
    if stem in fixed:
        return f"{fixed[stem]}.weight"
    _, layer, part = stem.split(".")
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    return f"model.layers.{layer}.{(NAMES | norms)[part]}.weight"


@pytest.mark.slow
def test_every_common_type_is_dequantized_as_gguf_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "Tiny.Mixed.gguf"
    stored = write(file, kinds=KINDS)
    assert {kind for _, kind in stored.values()} >= set(KINDS)
    check_model(str(file))
    with caplog.at_level(logging.INFO):
        directory = model_directory(str(file))
    assert any("converting Tiny.Mixed.gguf" in message for message in caplog.messages)
    found = read_dense(directory)
    assert found.keys() == {converted_name(name) for name in stored}
    for name, (data, kind) in stored.items():
        expected = gguf.dequantize(data, kind)
        assert np.isfinite(expected).all(), name
        if "attn_q" in name or "attn_k" in name:
            expected = restored(expected, HEADS if "attn_q" in name else KV_HEADS)
        assert np.array_equal(found[converted_name(name)].float().numpy(), expected), (name, kind)


@pytest.mark.slow
def test_matrices_stay_in_the_file(tmp_path: Path) -> None:
    write(file := tmp_path / "Tiny.Mixed.gguf", kinds=KINDS)
    directory = model_directory(str(file))
    tensors = load_file(directory / "model-00001.safetensors")
    assert {tensor.ndim for tensor in tensors.values()} == {1}
    assert [path.name for path in weight_files(directory)] == [SOURCE, "model-00001.safetensors"]
    assert read_scheme(directory).describe().startswith("gguf: 1 of BF16, 1 of F16, 1 of F32")  # type: ignore[union-attr]


GROUPED = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q4_K, Kind.IQ4_NL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_layers_multiply_the_numbers_of_the_file(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits as from the same values in fp32, bit for bit; integers stay integers if a scale has 32 inputs."""
    write(file := tmp_path / "Tiny.gguf", kinds=(kind,))
    dense = dense_directory(model_directory(str(file)))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3)

    def logprobs(model: str) -> Any:
        with caplog.at_level(logging.INFO):
            (out,) = LLM(model, num_threads=1, num_kv_blocks=64).generate(
                "ab 1234567", params, use_tqdm=False
            )
        return out.outputs[0].logprobs

    expected = logprobs(str(dense))
    caplog.clear()
    assert logprobs(str(file)) == expected
    is_kept = "integers, lossless" in caplog.text
    assert is_kept == (kind in GROUPED)


@pytest.mark.slow
def test_a_file_that_is_moved_is_read_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file := tmp_path / "Tiny.gguf", kinds=KINDS)
    directory = model_directory(str(file))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    file.rename(moved := elsewhere / "Tiny.gguf")
    with pytest.raises(ModelLoadError, match=f"can't read {file}: .*; give the path of the file"):
        read_tensors(weight_files(directory))
    with caplog.at_level(logging.INFO):
        assert model_directory(str(moved)) == directory
    assert not any("converting" in message for message in caplog.messages)
    assert read_tensors(weight_files(directory))


@pytest.mark.slow
def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    write(file := tmp_path / "Tiny.gguf", kinds=KINDS)
    directory = model_directory(str(file))
    break_off(file)
    for check in (lambda: read_tensors(weight_files(directory)), lambda: check_header(directory / SOURCE)):
        with pytest.raises(ModelLoadError, match=r"its tensors end at \d+: download it again"):
            check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda quantization: quantization.pop("tensors"),
        lambda quantization: quantization.pop("orders"),
        lambda quantization: quantization["tensors"].update(a={}),
        lambda quantization: quantization["tensors"].update(a=3),
    ],
)
def test_a_damaged_directory_is_refused(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    write(file := tmp_path / "Tiny.gguf")
    config_file = model_directory(str(file)) / "config.json"
    config = json.loads(config_file.read_text())
    change(config["quantization_config"])
    config_file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="can't read quantization_config of a GGUF file"):
        LLM(str(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_K, Kind.Q6_K, Kind.F16], ids=["Q4_0", "Q4_K", "Q6_K", "F16"]
)
def test_ranks_read_their_shares(kind: Kind, tmp_path: Path) -> None:
    write(file := tmp_path / "Tiny.gguf", kinds=(kind,))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = []
    for size in (1, 2):
        llm = LLM(str(file), num_threads=1, num_kv_blocks=64, tensor_parallel_size=size)
        (out,) = llm.generate("ab 1234567", params, use_tqdm=False)
        tokens.append(out.outputs[0].token_ids)
        llm.close()
    assert tokens[0] == tokens[1]


EXPERTS, EXPERT_SIZE = 4, 64


NORMS = {
    "attn_norm": ("input_layernorm", HIDDEN),
    "ffn_norm": ("post_attention_layernorm", HIDDEN),
    "attn_q_norm": ("self_attn.q_norm", 64),
    "attn_k_norm": ("self_attn.k_norm", 64),
}
ATTENTION = {
    "attn_q": ("q_proj", (64 * HEADS, HIDDEN)),
    "attn_k": ("k_proj", (64 * KV_HEADS, HIDDEN)),
    "attn_v": ("v_proj", (64 * KV_HEADS, HIDDEN)),
    "attn_output": ("o_proj", (HIDDEN, HIDDEN)),
}


def write_experts(file: Path, kinds: tuple[Kind, Kind, Kind]) -> dict[str, torch.Tensor]:
    """A tiny random Qwen3 MoE as llama.cpp writes it; returns its tensors by transformers' names."""
    random, tensors = np.random.default_rng(1), {}
    writer = begin(file, "qwen3moe", "qwen2", SIZES)
    writer.add_expert_feed_forward_length(EXPERT_SIZE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_key_length(64)
    writer.add_value_length(64)

    def add(name: str, own: str, shape: tuple[int, ...], kind: Kind = Kind.F32) -> None:
        weights = (random.standard_normal(shape) * 0.1 + (len(shape) == 1)).astype(np.float32)
        data = gguf.quantize(weights, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        tensors[own] = torch.from_numpy(gguf.dequantize(data, kind).reshape(shape).copy())

    gate, up, down = kinds
    add("token_embd", "model.embed_tokens.weight", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        block, own = f"blk.{layer}", f"model.layers.{layer}"
        for name, (part, shape) in ATTENTION.items():
            add(f"{block}.{name}", f"{own}.self_attn.{part}.weight", shape, gate)
        for name, (part, size) in NORMS.items():
            add(f"{block}.{name}", f"{own}.{part}.weight", (size,))
        experts = f"{own}.mlp.experts"
        add(f"{block}.ffn_gate_inp", f"{own}.mlp.gate.weight", (EXPERTS, HIDDEN))
        add(f"{block}.ffn_gate_exps", "gate", (EXPERTS, EXPERT_SIZE, HIDDEN), gate)
        add(f"{block}.ffn_up_exps", "up", (EXPERTS, EXPERT_SIZE, HIDDEN), up)
        add(f"{block}.ffn_down_exps", f"{experts}.down_proj", (EXPERTS, HIDDEN, EXPERT_SIZE), down)
        tensors[f"{experts}.gate_up_proj"] = torch.cat([tensors.pop("gate"), tensors.pop("up")], dim=1)
    add("output", "lm_head.weight", (VOCAB, HIDDEN))
    add("output_norm", "model.norm.weight", (HIDDEN,))
    finish(writer)
    return tensors


def assert_greedy(llm: LLM, reference: Any) -> None:
    """The engine's output equals that of transformers' module, token by token."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt in ("ab 1234567", "x"):
        (out,) = llm.generate(prompt, params, use_tqdm=False)
        tokens = list(out.prompt_token_ids)
        for _ in range(8):
            with torch.inference_mode():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert out.outputs[0].token_ids == tokens[len(out.prompt_token_ids) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [(Kind.Q4_0, Kind.Q4_0, Kind.Q8_0), (Kind.Q8_0, Kind.Q4_1, Kind.F16)], ids=["alike", "mixed"]
)
def test_experts_stay_in_the_file_too(kinds: tuple[Kind, Kind, Kind], tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, moe_intermediate_size=EXPERT_SIZE,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=64,
        num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=128,
        rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    reference: Any = Qwen3MoeForCausalLM(config).eval()
    reference.load_state_dict(write_experts(file := tmp_path / "Tiny.MoE.gguf", kinds))
    directory = model_directory(str(file))
    stored = load_file(directory / "model-00001.safetensors")
    assert {tensor.ndim for tensor in stored.values()} == {1}
    assert_greedy(LLM(str(file), num_threads=1, num_kv_blocks=64), reference)


@pytest.mark.slow
def test_a_file_generates_what_its_tensors_do_in_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    file = tmp_path / "Tiny.F32.gguf"
    stored = write(file)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, rms_norm_eps=1e-5,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, eos_token_id=258,
    )  # fmt: skip
    reference: Any = LlamaForCausalLM(config).eval()
    state = {converted_name(name): torch.from_numpy(data) for name, (data, _) in stored.items()}
    for name in state:
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            state[name] = torch.from_numpy(restored(state[name].numpy(), heads).copy())
    reference.load_state_dict(state)
    assert_greedy(LLM(str(file), num_threads=1, num_kv_blocks=64), reference)


def break_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def within_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:10])


def no_gguf(file: Path) -> None:
    file.write_bytes(b"<!DOCTYPE html>" + file.read_bytes())


def old_version(file: Path) -> None:
    file.write_bytes(b"GGUF" + struct.pack("<I", 1) + file.read_bytes()[8:])


def many_tensors(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:8] + struct.pack("<Q", 2**60) + file.read_bytes()[16:])


def long_key(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:24] + struct.pack("<Q", 2**60) + file.read_bytes()[32:])


def long_list(file: Path) -> None:
    content = file.read_bytes()
    place = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    file.write_bytes(content[:place] + struct.pack("<Q", 2**60) + content[place + 8 :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (within_the_header, "ends within its header"), (no_gguf, "is not a GGUF file"),
        (old_version, "version 1 of GGUF"),
        (many_tensors, "cannot be in"),
    ],
)  # fmt: skip
def test_a_header_that_can_not_be_is_refused_before_anything_is_imported(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write(file := tmp_path / "model.gguf")
    damage(file)
    with pytest.raises(ModelLoadError, match=message):
        check_model(str(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        pytest.param(break_off, {}, "is damaged", id="truncated"),
        pytest.param(long_key, {}, "is damaged", id="long key", marks=pytest.mark.slow),
        pytest.param(long_list, {}, "is damaged|took more", id="long list", marks=pytest.mark.slow),
        pytest.param(None, {"architecture": "bert"}, "'bert' are not supported", id="kind", marks=pytest.mark.slow),
        pytest.param(
            None, {"leave_out": "blk.1.ffn_up.weight"}, "1 tensors are missing", id="missing", marks=pytest.mark.slow
        ),
        pytest.param(
            None, {"surplus": "blk.1.strange.weight"}, "no place in a llama", id="surplus", marks=pytest.mark.slow
        ),
        pytest.param(
            None, {"change": lambda fields: fields.update(block_count=2**31)}, "names more layers", id="layers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None, {"change": lambda fields: fields.update(kv_heads=4)}, "has shape", id="shapes", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_lies_is_refused_in_a_line(
    damage: Callable[[Path], None] | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(file := tmp_path / "model.gguf", **options)
    if damage is not None:
        damage(file)
    with pytest.raises(ModelLoadError, match=message) as refused:
        model_directory(str(file))
    assert "\n" not in str(refused.value)
    assert not any((tmp_path / "cache").glob("*/config.json"))


REFUSED: list[tuple[str, Callable[[gguf.GGUFWriter], object]]] = [
    ("llama.rope.scaling.type = linear", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)),
    ("llama.rope.scaling.factor = 4.0", lambda w: w.add_rope_scaling_factor(4.0)),
    ("llama.rope.scale_linear = 4.0", lambda w: w.add_float32("llama.rope.scale_linear", 4.0)),
    ("llama.attention.sliding_window = 8", lambda w: w.add_sliding_window(8)),
    ("llama.expert_count = 4", lambda w: w.add_expert_count(4)),
    ("llama.logit_scale = 2.0", lambda w: w.add_logit_scale(2.0)),
    ("llama.unheard_of = 3", lambda w: w.add_uint32("llama.unheard_of", 3)),
    ("part 1 of 3 of a split file", lambda w: (w.add_uint16("split.no", 0), w.add_uint16("split.count", 3))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("message", "add"), REFUSED, ids=[message for message, _ in REFUSED])
def test_a_field_that_is_not_used_is_refused_by_name(
    message: str, add: Callable[[gguf.GGUFWriter], object], tmp_path: Path
) -> None:
    from pagemill.engine.models.formats.gguf_conversion import convert_gguf

    write(file := tmp_path / "model.gguf", add=add)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf([file], tmp_path)


def add_harmless(writer: gguf.GGUFWriter) -> None:
    writer.add_name("x")
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1.0)
    writer.add_expert_count(0)
    writer.add_eot_token_id(259)
    writer.add_eom_token_id(260)
    writer.add_array("tokenizer.ggml.eos_token_ids", [258, 261])


@pytest.mark.slow
def test_every_end_token_stops_and_llama_3_begins_with_bos(tmp_path: Path) -> None:
    from pagemill.engine.text.tokenizer import generation_eos_token_ids, load_tokenizer

    write(file := tmp_path / "model.gguf", add=add_harmless)
    directory = model_directory(str(file))
    assert sorted(generation_eos_token_ids(directory)) == [258, 259, 260, 261]
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    assert tokenizer.encode("ab")[0] == 257
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != 257
    write(plain := tmp_path / "plain.gguf", add=lambda writer: writer.add_add_bos_token(False))
    tokenizer = load_tokenizer(model_directory(str(plain)))
    assert tokenizer is not None
    assert tokenizer.encode("ab")[0] != 257


def test_no_such_file() -> None:
    with pytest.raises(ModelLoadError, match=r"no model at '/nowhere/model\.gguf'"):
        check_model("/nowhere/model.gguf")


def rope_factors(factor: float) -> np.ndarray:
    """As llama.cpp computes them from config.json's `rope_scaling`."""
    frequencies = 1.0 / 500000.0 ** (np.arange(0, 64, 2, dtype=np.float64) / 64)
    lengths = 2 * np.pi / frequencies
    smooth = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_rope_factors_of_llama_3_are_recognised() -> None:
    from transformers import LlamaConfig

    from pagemill.engine.models.formats.gguf_conversion import apply_rope_factors

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_theta=500000.0)
    apply_rope_factors(config, torch.from_numpy(rope_factors(32.0)))
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == 32.0
    with pytest.raises(ModelLoadError, match="not llama3 scaling"):
        apply_rope_factors(config, torch.linspace(1, 2, 32))


def test_a_text_is_cut_as_the_file_says(tmp_path: Path) -> None:
    """Digits in groups of three in Llama 3's tokenizer; GPT-2's pattern would join all of them."""
    from types import SimpleNamespace

    from tokenizers import Tokenizer, models

    from pagemill.engine.models.formats.gguf_tokenizer import correct_tokenizer

    def cut(kind: str) -> list[str]:
        backend = Tokenizer(models.BPE())
        fields = {"tokenizer.ggml.pre": SimpleNamespace(contents=lambda: kind)}
        correct_tokenizer(SimpleNamespace(backend_tokenizer=backend), SimpleNamespace(get_field=fields.get))
        return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345")]

    assert cut("llama-bpe") == ["a", "\u0120", "123", "45"]
    assert cut("qwen2") == ["a", "\u0120", "1", "2", "3", "4", "5"]
    assert json.dumps(cut("smollm")) == json.dumps(["a", "\u0120", "1", "2", "3", "4", "5"])


@pytest.mark.slow
def test_a_sentencepiece_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    """The ids of Mistral's first tokenizer, from the file's lists of pieces, scores and types."""
    import sentencepiece

    from pagemill.engine.models.formats.gguf_tokenizer import sentencepiece_of
    from pagemill.engine.text.tokenizer import HuggingFaceTokenizer
    from pagemill.engine.text.tokenizer_files import save_sentencepiece
    from tests.engine.text.test_tokenizer_files import TEXTS, shipped

    source = shipped("mistral_common", "data/tokenizer.model.v1")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(source))
    numbers = range(reference.vocab_size())
    tests = (
        (reference.is_byte, 6),
        (reference.is_control, 3),
        (reference.is_unknown, 2),
        (reference.is_unused, 5),
    )
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([reference.id_to_piece(n) for n in numbers])
    writer.add_token_scores([reference.get_score(n) for n in numbers])
    writer.add_token_types([next((kind for test, kind in tests if test(n)), 1) for n in numbers])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "out").mkdir()
    save_sentencepiece(*sentencepiece_of(gguf.GGUFReader(tmp_path / "model.gguf")), tmp_path / "out")
    tokenizer = HuggingFaceTokenizer(tmp_path / "out")
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *reference.encode(text)]
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}], (), {})
    assert tokenizer.encode(prompt, add_special_tokens=False) == reference.encode("Hi")
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (2, 32000)


_PEAK = """
import resource, sys
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.models.loader import load_model
from pagemill.kernels.cpu.matmul import fp32, grouped_packing

device = CpuBackend()
fp32.warm_up()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = load_model(EngineConfig(model=sys.argv[1]), device)
device.fuse(model.module, model.family.decoder, model.dtype, LinearOptions(None, False))
print(before, peak(), model.weight_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=["Q8_0", "Q4_1"])
def test_a_large_file_takes_little_more_memory_than_its_packed_weights(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including mapped pages: they are released one matrix after the other."""
    size = 2048
    monkeypatch.setitem(globals(), "HIDDEN", size)
    monkeypatch.setitem(globals(), "LAYERS", 10)
    monkeypatch.setitem(SIZES, "block_count", 10)
    write(file := tmp_path / "Large.gguf", kinds=(kind,))
    model_directory(str(file))
    run = run_python("-c", _PEAK, str(file), cwd=ROOT, check=True)
    before, peak, kept = map(int, run.stdout.split()[-3:])
    assert kept > 10 * 6 * size * size * (0.7 if kind is Kind.Q4_1 else 1.0)
    assert peak - before < 1.3 * kept + (32 << 20), (before >> 20, peak >> 20, kept >> 20)
