"""Which files of a repository are downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.hubs.repository import Listing

SMALL = [
    "config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json",
    "vocab.json",
]  # fmt: skip
REST = [
    "README.md", ".gitattributes", "LICENSE", "setup.py", "tf_model.h5", "flax_model.msgpack", "rust_model.ot",
    "onnx/model.onnx", "original/consolidated.00.pth", "original/params.json", "onnx_config.json.bak",
    "training_args.bin", "trainer_state.json", "consolidated.safetensors", "adapter_model.safetensors",
    "../evil.json", "a/../../evil.model",
    "runs/events.out", "optimizer.bin", "model.onnx", "..", "/etc/tokenizer.json",
]  # fmt: skip


def listing(*names: str) -> Listing:
    return Listing("org/name", "c" * 40, dict.fromkeys((*names, *SMALL, *REST), 10))


def index(directory: Path, name: str, *shards: str) -> None:
    (directory / name).write_text(
        json.dumps({"weight_map": {f"t{n}": shard for n, shard in enumerate(shards)}})
    )


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "model.fp16.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["weights-1.safetensors", "weights-2.safetensors", "pytorch_model.bin"],
         ["weights-1.safetensors", "weights-2.safetensors"]),
        (["odd.bin"], ["odd.bin"]),
    ],
)  # fmt: skip
def test_weights_of_one_format(tmp_path: Path, there: list[str], wanted: list[str]) -> None:
    assert listing(*there).weights(tmp_path) == wanted


def test_small_files_are_those_of_configuration_and_tokenizer() -> None:
    assert listing().small_files() == SMALL
    others = [
        "tokenizer.model", "chat_template.jinja", "qwen.tiktoken", "spiece.model", "special_tokens_map.json",
    ]  # fmt: skip
    assert set(listing(*others).small_files()) == {*SMALL, *others}


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_says_which_shards(tmp_path: Path, kind: str) -> None:
    name = f"{kind}.index.json"
    index(tmp_path, name, "s-2", "s-1", "s-1")
    assert listing(name, "s-1", "s-2", "s-3").weights(tmp_path) == ["s-1", "s-2"]
    assert listing(name, "s-1", "s-2", kind).weights(tmp_path) == [kind], "the index of earlier files"
    with pytest.raises(ModelLoadError, match="lacks 1 of its 2 weight files, s-2 first"):
        listing(name, "s-1").weights(tmp_path)


@pytest.mark.parametrize("shard", ["../../secret.safetensors", "/etc/passwd", "sub/s.safetensors", ""])
def test_an_index_leads_nowhere_else(tmp_path: Path, shard: str) -> None:
    index(tmp_path, "model.safetensors.index.json", shard)
    with pytest.raises(ModelLoadError, match="not a file next to it"):
        listing("model.safetensors.index.json", shard).weights(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": [1]}', "null", "\xff"])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"can't read model\.safetensors\.index\.json"):
        listing("model.safetensors.index.json").weights(tmp_path)


def test_what_is_no_model_says_what_it_is(tmp_path: Path) -> None:
    def of(*names: str) -> Listing:
        return Listing("org/name", "c" * 40, dict.fromkeys(names, 1))

    with pytest.raises(ModelLoadError, match="adapter; give the model"):
        of("adapter_config.json", "adapter_model.safetensors").small_files()
    with pytest.raises(ModelLoadError, match=r"\.gguf files alone"):
        of("m-Q4_K_M.gguf").small_files()
    with pytest.raises(ModelLoadError, match="has no config"):
        of("README.md").small_files()
    with pytest.raises(ModelLoadError, match="no weights"):
        of("config.json", "adapter_model.safetensors").weights(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file has"):
        Listing("org/name", "c" * 40, {"config.json": 2**40}).small_files()
