"""Invalid model folders: one line with the remedy, before any large file is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.models.directory import check_model
from tests.engine.models.families.native_cases import LLAMA, write_llama
from tests.engine.models.families.tiny import native_checkpoint, write_tensors

GIB = 2**30


def empty(directory: Path) -> None:
    pass


def adapter(directory: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-2-7b-hf", "r": 8}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    write_tensors(
        directory, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}
    )
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")


def training_state(directory: Path) -> None:
    torch.save({}, directory / "optimizer.pt")
    torch.save({}, directory / "scheduler.pt")


def one_level_up(directory: Path) -> None:
    write_llama(directory / "final")


def loop(directory: Path) -> None:
    (directory / "config.json").symlink_to("config.json")


def gguf_folder(directory: Path) -> None:
    (directory / "model.Q4_K_M.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (empty, r"config\.json is missing\): it is empty"),
        (adapter, r"is an adapter of meta-llama/Llama-2-7b-hf, not a model: merge the two"),
        (training_state, r"config\.json is missing\): it holds the state of a training run \(optimizer\.pt\)"),
        (one_level_up, r"config\.json is missing\): did you mean .*/final\?"),
        (loop, r"config\.json is missing\): it holds 1 other files"),
        (gguf_folder, r"holds GGUF files: give one of them, as .*/model\.Q4_K_M\.gguf"),
    ],
)  # fmt: skip
def test_no_model_directory(write: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ModelLoadError, match=message) as refused:
        check_model(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_loop_of_directories(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("model")
    with pytest.raises(ModelLoadError, match="no model at"):
        check_model(str(tmp_path / "model"))


def sparse(directory: Path, *, missing_bytes: int = 0) -> None:
    """A checkpoint of 8 GiB that does not use disk space, in two shards."""
    index = {}
    for shard in (1, 2):
        file = directory / f"model-0000{shard}-of-00002.safetensors"
        header = {f"big{shard}": {"dtype": "F32", "shape": [GIB], "data_offsets": [0, 4 * GIB]}}
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            opened.truncate(8 + len(text) + 4 * GIB - (missing_bytes if shard == 2 else 0))
        index[f"big{shard}"] = file.name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_config(directory: Path, **fields: Any) -> None:
    (directory / "config.json").write_text(json.dumps(LLAMA | fields))


def truncated_shard(directory: Path) -> None:
    write_config(directory)
    sparse(directory, missing_bytes=1000)


def other_tensors(directory: Path) -> None:
    write_config(directory)
    sparse(directory)


def sparse_pickle(directory: Path) -> None:
    """The file of a download that has reserved its space: 8 GiB of zeros."""
    write_config(directory)
    with (directory / "pytorch_model.bin").open("wb") as opened:
        opened.truncate(8 * GIB)


def wrong_dtype(directory: Path) -> None:
    write_llama(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
    write_tensors(directory, tensors)


def size(name: str, value: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        write_llama(directory)
        write_config(directory, **{name: value})

    write.__name__ = name
    return write


def outside(name: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        write_config(directory)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    write.__name__ = f"outside {name}"
    return write


def outside_pickle(directory: Path) -> None:
    write_config(directory)
    index = {"weight_map": {"a": "../../../etc/passwd"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def missing_pickle(directory: Path) -> None:
    write_config(directory)
    index = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def no_weights(directory: Path) -> None:
    write_config(directory)
    torch.save({}, directory / "optimizer.bin")


def adapter_with_config(directory: Path) -> None:
    adapter(directory)
    write_config(directory)


def looping_weights(directory: Path) -> None:
    write_config(directory)
    (directory / "model.safetensors").symlink_to("model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (truncated_shard, r"model-00002-of-00002\.safetensors: .*download it again"),
        (other_tensors, "config.json asks for|tensors are missing"),
        (sparse_pickle, r"pytorch_model\.bin is damaged .*download it again"),
        (wrong_dtype, r"model\.layers\.1\.mlp\.up_proj\.weight has dtype int8"),
        (size("num_hidden_layers", 10**9), "asks for 1000000000 layers, of 21 tensors"),
        (size("hidden_size", 2**40), "a hidden_size of 1099511627776"),
        (size("vocab_size", 2**40), "a vocab_size of 1099511627776"),
        (size("intermediate_size", 2**40), "an? intermediate_size of 1099511627776"),
        (outside("../../../../etc/passwd"), "names files outside of its directory"),
        (outside("/etc/passwd"), "names files outside of its directory"),
        (outside_pickle, "names files outside of its directory"),
        (missing_pickle, "1 of 1 files are missing, pytorch_model-00001-of-00001.bin first; download them again"),
        (no_weights, r"has no weights .* training run \(optimizer\.bin\)"),
        (adapter_with_config, "it holds an adapter of meta-llama/Llama-2-7b-hf: merge the two"),
        (looping_weights, "has no weights|can't load the weights"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_checkpoint_that_can_not_be_loaded(
    write: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=message) as refused:
        LLM(str(tmp_path / "model"), num_threads=1, num_kv_blocks=64)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 800


def test_a_model_of_the_hubs_cache_is_links_that_lead_out(tmp_path: Path) -> None:
    """Allowed: the restriction applies to the names in an index."""
    native_checkpoint(LLAMA).write(tmp_path / "blobs", num_shards=2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(os.path.join("..", "blobs", file.name))
    LLM(str(tmp_path / "snapshot"), num_threads=1, num_kv_blocks=64)
