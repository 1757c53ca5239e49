"""GGUF files: gguf's own numbers under transformers' names, and one line for what is damaged."""

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

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.models.checkpoint import read_tensors, weight_files
from pagemill.engine.models.directory import check_model, model_directory
from pagemill.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

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
    """Rows as llama.cpp stores those of queries and keys."""
    return weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def restored(weights: np.ndarray, heads: int) -> np.ndarray:
    return weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def byte_level_vocabulary() -> list[str]:
    from pagemill.engine.text.byte_level import byte_characters

    return [*byte_characters(), "ab", *(f"<|extra_{n}|>" for n in range(VOCAB - 257))]


def write(
    file: Path, *, kinds: tuple[Kind, ...] = (Kind.F32,), architecture: str = "llama",
    change: Callable[[dict[str, Any]], object] = lambda fields: None,
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None, leave_out: str = "", surplus: str = "",
) -> dict[str, tuple[np.ndarray, Kind]]:  # fmt: skip
    """A tiny random LLaMA as llama.cpp writes it; returns the bytes of each tensor and their kind."""
    random = np.random.default_rng(0)
    fields: dict[str, Any] = {"block_count": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "vocab": VOCAB}
    change(fields)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(fields["block_count"])
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(fields["heads"])
    writer.add_head_count_kv(fields["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(fields["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(byte_level_vocabulary())
    writer.add_token_types([1] * 257 + [3] * (VOCAB - 257))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    add(writer)
    stored: dict[str, tuple[np.ndarray, Kind]] = {}

    def matrix(name: str, rows: int, heads: int = 0) -> None:
        kind = kinds[sum(1 for data, _ in stored.values() if data.ndim == 2) % len(kinds)]
        weights = (random.standard_normal((rows, HIDDEN)) * 0.2).astype(np.float32)
        if heads:
            weights = permuted(weights, heads)
        try:
            data = gguf.quantize(weights, kind)
        except NotImplementedError:  # gguf can read it alone: any bytes that make no infinite scale
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
def test_every_common_type_is_dequantised_as_gguf_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "Tiny.Mixed.gguf"
    stored = write(file, kinds=KINDS)
    assert {kind for _, kind in stored.values()} >= set(KINDS)
    check_model(str(file))
    with caplog.at_level(logging.INFO):
        directory = model_directory(str(file))
    assert any("converting Tiny.Mixed.gguf" in message for message in caplog.messages)
    found = read_tensors(weight_files(directory))
    assert found.keys() == {converted_name(name) for name in stored}
    for name, (data, kind) in stored.items():
        expected = gguf.dequantize(data, kind)
        assert np.isfinite(expected).all(), name
        if "attn_q" in name or "attn_k" in name:
            expected = restored(expected, HEADS if "attn_q" in name else KV_HEADS)
        assert found[converted_name(name)].dtype == torch.float32
        assert np.array_equal(found[converted_name(name)].numpy(), expected), (name, kind)


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
    llm = LLM(str(file), num_threads=1, num_kv_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt in ("ab 1234567", "x"):
        (out,) = llm.generate(prompt, params, use_tqdm=False)
        tokens = list(out.prompt_token_ids)
        for _ in range(8):
            with torch.inference_mode():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert out.outputs[0].token_ids == tokens[len(out.prompt_token_ids) :]


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
        (many_tensors, "can't lie in"),
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
    """Digits by threes in Llama 3's tokenizer; GPT-2's pattern would take all of them at once."""
    from types import SimpleNamespace

    from tokenizers import Tokenizer, models

    from pagemill.engine.models.formats.gguf_tokenizer import correct_tokenizer

    def cut(kind: str) -> list[str]:
        backend = Tokenizer(models.BPE())
        field = SimpleNamespace(contents=lambda: kind)
        correct_tokenizer(
            SimpleNamespace(backend_tokenizer=backend), SimpleNamespace(get_field=lambda _: field)
        )
        return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345")]

    assert cut("llama-bpe") == ["a", "\u0120", "123", "45"]
    assert cut("qwen2") == ["a", "\u0120", "1", "2", "3", "4", "5"]
    assert json.dumps(cut("smollm")) == json.dumps(["a", "\u0120", "1", "2", "3", "4", "5"])


@pytest.mark.slow
def test_a_sentencepiece_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    """Those of Mistral's first tokenizer, from the file's lists of pieces, scores and types."""
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
