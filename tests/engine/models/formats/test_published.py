"""Checkpoints laid out as their publishers uploaded them: names of files and tensors, shards, dtypes, oddities.

A folder's greedy output must equal that of the model from which its tensors were taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import torch

from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.tiktoken_vocabulary import QWEN_PATTERN, read_ranks
from tests.engine.models.families import native_cases, remote_cases
from tests.engine.models.families.remote_cases import aquila, baichuan2_7b, baichuan_7b, internlm, qwen
from tests.engine.models.families.tiny import (
    NUM_OUTPUT_TOKENS,
    PROMPTS,
    TinyCheckpoint,
    native_checkpoint,
    write_tensors,
)
from tests.engine.text.test_tokenizer_files import train, write_ranks


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path / "cache"))


def write_pickles(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """`pytorch_model.bin`, or shards of it with their index, as `save_pretrained` wrote them."""
    if num_shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.bin"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_shards == shard}
        torch.save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@dataclass(frozen=True)
class Published:
    """A checkpoint and how it is stored."""

    checkpoint: TinyCheckpoint
    num_shards: int = 1
    files: tuple[str, ...] = ()
    """Additional Python files, which must not run."""

    def write(self, directory: Path) -> Path:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.checkpoint.config))
        (directory / "generation_config.json").write_text('{"_from_model_config": true}')
        write_pickles(directory, self.checkpoint.tensors, self.num_shards)
        for name in self.files:
            (directory / name).with_suffix(".py").write_text(f"open({str(directory / 'ran')!r}, 'w')")
        return directory


def rounded(config: dict[str, Any], dtype: torch.dtype, **options: Any) -> TinyCheckpoint:
    """A native family's checkpoint in half precision; its reference computes with the same values."""

    def prepare(model: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()

    checkpoint = native_checkpoint(config, prepare=prepare, **options)
    tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def gpt2() -> Published:
    """Without `transformer.`, and with the causal masks of each layer."""
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(2)}
    plain = native_checkpoint(native_cases.GPT2, rename=lambda name: name.removeprefix("transformer."))
    return Published(replace(plain, tensors=plain.tensors | masks))


def opt(prefix: str) -> Published:
    """facebook/opt-125m uses `decoder.` where transformers uses `model.decoder.`; larger ones come in shards."""
    checkpoint = rounded(
        native_cases.OPT, torch.float16, rename=lambda name: name.replace("model.decoder.", prefix)
    )
    return Published(checkpoint, num_shards=1 if prefix == "decoder." else 2)


CASES: dict[str, Callable[[], Published]] = {
    "GPT-2": gpt2,
    "OPT-125m": lambda: opt("decoder."),
    "OPT-1.3b": lambda: opt("model.decoder."),
    "Baichuan-7B": lambda: Published(baichuan_7b(), files=("configuration_baichuan", "modeling_baichuan")),
    "Baichuan2-7B": lambda: Published(baichuan2_7b(), num_shards=2),
    "AquilaChat-7B": lambda: Published(aquila(), num_shards=3, files=("modeling_aquila",)),
    "InternLM-7B": lambda: Published(internlm(bias=True), num_shards=8, files=("modeling_internlm",)),
    "Falcon-7B, first release": lambda: Published(
        native_cases.first_release_falcon("RefinedWebModel"), num_shards=2, files=("modelling_RW",)
    ),
    "BLOOM-560m": lambda: Published(native_checkpoint(native_cases.BLOOM)),
}
QUICK = ("OPT-125m", "GPT-2")
"""Each is converted in a separate process, which takes seconds to start."""


def check(directory: Path, checkpoint: TinyCheckpoint) -> LLM:
    llm = LLM(
        str(directory), dtype="float32", num_threads=1, num_kv_blocks=64, block_size=4, **checkpoint.options
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in results] == [
        checkpoint.complete(prompt) for prompt in PROMPTS
    ]
    assert not (directory / "ran").exists()
    return llm


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_pickled_as_published(name: str, tmp_path: Path) -> None:
    published = CASES[name]()
    check(published.write(tmp_path / "model"), published.checkpoint)


def enlarge(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the vocabulary for a real tokenizer's ids."""
    monkeypatch.setattr(remote_cases, "VOCAB_SIZE", vocab_size)
    monkeypatch.setitem(remote_cases.CONFIG, "vocab_size", vocab_size)


def check_text(llm: LLM, checkpoint: TinyCheckpoint, text: str, token_ids: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    (out,) = llm.generate(text, params, use_tqdm=False)
    assert out.prompt_token_ids == token_ids
    assert out.outputs[0].token_ids == checkpoint.complete(token_ids)


@pytest.mark.slow
def test_baichuan_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One .bin, tokenizer.model, and an auto_map for everything."""
    enlarge(500, monkeypatch)
    checkpoint = baichuan_7b()
    directory = Published(checkpoint, files=("tokenization_baichuan",)).write(tmp_path / "model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(train(directory, model_type="bpe")))
    config = {
        "add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaiChuanTokenizer", None]},
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True,
                      "rstrip": False, "single_word": True},
        "model_max_length": 4096, "sp_model_kwargs": {}, "tokenizer_class": "BaiChuanTokenizer",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    llm = check(directory, checkpoint)
    check_text(llm, checkpoint, "Hello 中文 world", reference.encode("Hello 中文 world"))


def test_qwen_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of safetensors, qwen.tiktoken, QWenConfig; the vocabulary is padded beyond the tokenizer's."""
    enlarge(900, monkeypatch)
    checkpoint = qwen()
    (directory := tmp_path / "model").mkdir()
    (directory / "config.json").write_text(json.dumps(checkpoint.config))
    write_tensors(directory, checkpoint.tensors, num_shards=2)
    tokens = read_ranks(write_ranks(directory))
    config = {
        "model_max_length": 8192, "tokenizer_class": "QWenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenization_qwen").with_suffix(".py").write_text(f"open({str(directory / 'ran')!r}, 'w')")
    reference = tiktoken.Encoding(
        "qwen", pat_str=QWEN_PATTERN, mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},
    )  # fmt: skip
    llm = check(directory, checkpoint)
    check_text(llm, checkpoint, "Hello 中文 world", reference.encode("Hello 中文 world"))
