"""A hub's repository at one commit, and the files of it that a worker needs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pagemill.engine.errors import ModelLoadError

# Only names in the root folder: no onnx/, original/ or flax weights, and no path outside of the folder.
_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken", "*.jinja", "chat_template*",
    "modules.json", "sentence_*_config.json", "config_sentence_transformers.json",
    "quant*_config.json", "hf_quant_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json",
)  # fmt: skip
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
# Files of Sentence Transformers: pooling, dense layers.
_MODULE_FILE = re.compile(r"[0-9]{1,2}_[A-Za-z]{1,40}/(config\.json|model\.safetensors|pytorch_model\.bin)")
# Files that are not weights: adapters, Mistral's format of the same tensors, a trainer's state, other models.
_NOT_WEIGHTS = re.compile(r"^(adapter|consolidated|optimizer|scheduler|training|rng_state|onnx|openvino)")
_SMALL_FILE_BYTES = 256 * 2**20
"""The largest vocabularies are a tenth of this size."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository's files on this machine."""

    directory: Path
    commit: str | None
    """The commit. None: the hub's cache does not record it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at a commit."""

    name: str
    """The repository's name, for messages."""
    commit: str
    sizes: dict[str, int]
    """File name -> bytes."""

    def small_files(self) -> list[str]:
        """Return configuration, tokenizer, templates and indexes.

        Raises:
            ModelLoadError: transformers cannot load the model.
        """
        if "config.json" not in self.sizes:
            raise ModelLoadError(f"{self.name} has no config.json: {self._describe_contents()}")
        chosen = [name for name in sorted(self.sizes) if _is_small_file(name)]
        for name in chosen:
            if self.sizes[name] > _SMALL_FILE_BYTES:
                raise ModelLoadError(
                    f"{self.name}: {name} has {self.sizes[name]:,} bytes, which no such file has"
                )
        return chosen

    def weights(self, directory: Path) -> list[str]:
        """Return the weight files; `directory` contains the small files. See `weight_names`."""
        return weight_names(self.sizes, directory, self.name) + _module_weights(self.sizes)

    def _describe_contents(self) -> str:
        if "adapter_config.json" in self.sizes:
            return "it is an adapter; give the model that it was made for"
        if any(name.endswith(".gguf") for name in self.sizes):
            return "it has .gguf files alone; give the repository of the original weights"
        return "not a model in transformers' format"


def weight_names(names: Collection[str], directory: Path, repository: str) -> list[str]:
    """Return the weight files to load among `names`: one set of safetensors; pickles only if there are none.

    Args:
        directory: contains the index, if `names` includes one.

    Raises:
        ModelLoadError: there are none, or the index names files that are not among them.
    """
    for index, whole, ending in (
        ("model.safetensors.index.json", "model.safetensors", ".safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", ".bin"),
    ):
        if whole in names:
            return [whole]  # an index next to it describes earlier files
        if index in names:
            return _indexed(directory / index, names, repository)
        others = [name for name in sorted(names) if name.endswith(ending) and _is_plain(name)]
        if others := [name for name in others if not _NOT_WEIGHTS.match(name)]:
            return others
    raise ModelLoadError(f"{repository} has no weights (*.safetensors or *.bin next to its config.json)")


def _indexed(index: Path, names: Collection[str], repository: str) -> list[str]:
    try:
        shards = sorted(set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{repository}: can't read {index.name}: {type(error).__name__}: {error}"
        ) from error
    if hostile := [name for name in shards if not _is_plain(name)]:
        raise ModelLoadError(
            f"{repository}: {index.name} names {hostile[0]!r}, which is not a file next to it"
        )
    if absent := [name for name in shards if name not in names]:
        raise ModelLoadError(
            f"{repository} lacks {len(absent)} of its {len(shards)} weight files, {absent[0]} first"
        )
    return shards


def _is_small_file(name: str) -> bool:
    if _MODULE_FILE.fullmatch(name):
        return name.endswith("/config.json")
    return _is_plain(name) and any(fnmatchcase(name, pattern) for pattern in _SMALL_FILES)


def _module_weights(names: Collection[str]) -> list[str]:
    """Return the weights of the modules that follow a Sentence Transformers model, one file each."""
    found: dict[str, str] = {}
    for name in sorted(names):  # safetensors come before pickles
        if _MODULE_FILE.fullmatch(name) and not name.endswith("/config.json"):
            found.setdefault(name.partition("/")[0], name)
    return list(found.values())


def _is_plain(name: str) -> bool:
    return _PLAIN_NAME.fullmatch(name) is not None
