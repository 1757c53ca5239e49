"""A checkpoint on disk: config.json and safetensors files, read without running its code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.json_files import read_json_object
from pagemill.engine.models.formats.gguf import SOURCE
from pagemill.engine.models.formats.gguf_tensors import map_tensors, read_contents
from pagemill.engine.models.formats.pickled import (
    PICKLED_INDEX,
    PICKLED_WHOLE,
    converted_pickles,
    find_pickles,
)
from pagemill.engine.models.misplaced import found_instead
from pagemill.engine.models.quantized.reader import join_parts, widened
from pagemill.engine.models.quantized.registry import find_scheme
from pagemill.engine.models.quantized.scheme import Scheme

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_QUANTIZATION = "quantization_config"
# Files in which the first releases of AutoGPTQ and AutoAWQ wrote it.
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Foreign files next to the weights: adapters, and Mistral's format of the same tensors.
_NOT_WEIGHTS = re.compile(r"^(adapter|consolidated|optimizer|training)")
# Constants saved by older transformers: causal masks, and frequencies that follow from config.json.
_CONSTANTS = re.compile(r"(\.rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$")


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json, without its quantization settings. Raises `ModelLoadError`."""
    raw = read_json_object(directory / "config.json")
    raw.pop(_QUANTIZATION, None)
    return raw


def names_scheme(directory: Path) -> bool:
    """Return True if config.json names a quantization format, of any kind. Raises `ModelLoadError`."""
    return bool(read_json_object(directory / "config.json").get(_QUANTIZATION))


def read_scheme(directory: Path) -> Scheme | None:
    """Return the format of a checkpoint's quantized weights, if any. Raises `ModelLoadError`."""
    quantization = read_json_object(directory / "config.json").get(_QUANTIZATION)
    for name, method in _OLDER_FILES.items():
        if not quantization and (directory / name).is_file():
            quantization = {"quant_method": method, **read_json_object(directory / name)}
    try:
        return find_scheme(quantization)
    except ModelLoadError as error:
        raise ModelLoadError(f"can't load {directory}: {error}") from error


def weight_files(directory: Path) -> list[Path]:
    """Return the model's safetensors files, and the GGUF file with the remaining tensors.

    Pickled weights are converted on first use.

    Raises:
        ModelLoadError: there are none, or the index names files that are missing or outside the directory; or pickled
            ones can't be converted.
    """
    if (source := directory / SOURCE).is_symlink():
        return [source, *sorted(directory.glob("*.safetensors"))]
    whole = directory / _WHOLE
    if whole.is_file():
        return [whole]  # an index next to it describes earlier files, which this one has replaced
    if (directory / _INDEX).is_file():
        return _indexed(directory, _INDEX)
    files = [file for file in sorted(directory.glob("*.safetensors")) if not _NOT_WEIGHTS.match(file.name)]
    if files:
        return files
    if (directory / PICKLED_INDEX).is_file() and not (directory / PICKLED_WHOLE).is_file():
        return converted_pickles(_indexed(directory, PICKLED_INDEX))
    if pickles := find_pickles(directory):
        return converted_pickles(pickles)
    raise ModelLoadError(
        f"{directory} has no weights (*.safetensors or pytorch_model*.bin): {found_instead(directory)}; "
        "download the model again (load_format='dummy' needs none)"
    )


def _indexed(directory: Path, name: str) -> list[Path]:
    index = directory / name
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"can't read {index}: it has no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    outside = [name for name in names if name in ("", "..") or Path(name).name != name]
    if outside:
        raise ModelLoadError(
            f"can't read {index}: it names files outside of its directory, {outside[0]!r} first"
        )
    files = [directory / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelLoadError(
            f"can't load the weights in {directory}: {len(absent)} of {len(files)} files are missing, "
            f"{absent[0]} first; download them again"
        )
    return files


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises ModelLoadError if it is truncated, not a safetensors file, or unreadable."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ModelLoadError(f"can't load the weights in {file}: {error}; download it again") from error


def check_header(file: Path) -> None:
    """Raise ModelLoadError unless the header is valid and matches the length of the file."""
    if file.name == SOURCE:
        read_contents(file)
        return
    with _opened(file):
        pass


def read_tensors(
    files: list[Path], renamed: Callable[[str], str | None] | None = None
) -> dict[str, torch.Tensor]:
    """Return every tensor by name, mapped into memory rather than read.

    Args:
        renamed: maps a tensor's name to the returned name; None: the tensor is omitted.

    Raises:
        ModelLoadError: a file is truncated or not a safetensors file, or all tensors are omitted.
    """
    tensors: dict[str, torch.Tensor] = {}

    def own_name(name: str) -> str | None:
        return name if renamed is None else renamed(name)

    for file in files:
        if file.name == SOURCE:
            mapped = map_tensors(file)
            tensors |= {own: tensor for name, tensor in mapped.items() if (own := own_name(name)) is not None}
            continue
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118, it is not a mapping
                if (own := own_name(name)) is not None:
                    tensors[own] = opened.get_tensor(name)
    if renamed is not None and not tensors:
        raise ModelLoadError(f"no tensor of {files[0].parent} belongs to a language model")
    return {name: tensor for name, tensor in tensors.items() if not _is_constant(name, tensor)}


def read_dense(
    directory: Path, renamed: Callable[[str], str | None] | None = None
) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors by name, with quantized ones in fp32. Raises like `read_tensors`."""
    tensors = read_tensors(weight_files(directory), renamed)
    scheme = read_scheme(directory)
    return tensors if scheme is None else widened(join_parts(tensors, scheme, torch.float32))


def _is_constant(name: str, tensor: torch.Tensor) -> bool:
    # A real bias of that name would have one dimension.
    return bool(_CONSTANTS.search(name)) and (tensor.ndim != 1 or name.endswith("inv_freq"))
