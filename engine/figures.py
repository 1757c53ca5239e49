"""A model's sizes, computed from its config.json alone: memory, and work per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.config import EngineConfig, StepDefaults
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.execution.kv_cache import resolve_cache_dtype
from pagemill.engine.json_files import read_json_object
from pagemill.engine.models.directory import obtain_model
from pagemill.engine.models.loader import load_outline
from pagemill.engine.models.packaged import find_gguf
from pagemill.engine.models.source import ModelSource
from pagemill.engine.scheduling.kv.block_groups import BlockGroups

_SCALE_BITS = 0.5
"""Bits of a group's scales and zero points, per 4-bit weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    name: str
    parameters: int
    read_parameters: int
    """Weights that a decode step reads in all matmuls. Embeddings are looked up, row by row."""
    layer_parameters: int
    """Weights that a token is multiplied with in all layers; of experts only the selected ones."""
    head_parameters: int
    """The same in the head, which runs only for the prompt's last token."""
    attention_width: int
    """Layers times heads times head dimension: a token's multiplications with one key or value of each."""
    weight_bits: float
    """Bytes of a weight as the device stores it."""
    weight_bytes: int
    block_size: int
    block_bytes: int
    """Bytes of a KV block, as the engine counts it."""
    expanded_block_bytes: int | None
    """Bytes of one with keys and values in place of latents; None: it stores keys and values."""
    windows: tuple[int | None, ...]
    """Window per group of layers with separate blocks; None: it reads everything."""
    state_bytes: int = 0
    """Bytes of a sequence's state in recurrent layers."""
    dtype: str
    kv_dtype: str
    context_length: int

    @property
    def read_bytes(self) -> float:
        """Bytes of weights that a decode step reads."""
        return self.read_parameters * self.weight_bits / 8

    def blocks_of(self, num_tokens: int) -> int:
        """Return the maximum number of KV blocks that a sequence of this many tokens holds at the same time."""
        groups = BlockGroups(self.block_size, self.windows, StepDefaults().max_num_batched_tokens)
        return sum(groups.most_held(window, groups.columns(num_tokens)) for window in self.windows)

    def kv_bytes_read(self, context: float) -> float:
        """Return the bytes of keys and values that a token after this many reads."""
        tokens = sum(min(context, abs(window or context)) for window in self.windows)
        return tokens * self.block_bytes / self.block_size


class _Found(Exception):
    def __init__(self, directory: Path) -> None:
        self.directory = directory


def read_figures(config: EngineConfig, *, on_card: bool, weight_bits: float | None = None) -> ModelFigures:
    """Measure a model without its weights; only small files of a model on a hub are downloaded.

    Args:
        on_card: for a CUDA device, which need not be present; otherwise for the CPU.
        weight_bits: per weight; None: as config.json specifies, or a GGUF file's size.

    Raises `ConfigError`, mostly `ModelLoadError`.
    """
    device: DeviceBackend = CudaBackend() if on_card else CpuBackend()
    directory = _directory(config.model)
    model = load_outline(replace(config, model=str(directory)), device)
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, model.dtype)
    longest = config.max_model_len or model.context_length
    shape = replace(model.kv_cache_shape(config.block_size, longest), dtype=cache_dtype)
    raw = read_json_object(directory / "config.json")
    counted = _Counted.from_module(model.module, model.module.config)
    bits = weight_bits or _weight_bits(config, raw, model.dtype, None if on_card else counted.parameters)
    settings: Any = model.module.config
    heads = model.num_heads
    num_heads = getattr(settings, "num_attention_heads", 1)
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // num_heads
    if shape.latent is not None:
        head_dim = shape.latent.cached
    return ModelFigures(
        name=directory.name
        if Path(config.model).name == "config.json"
        else ModelSource.parse(config.model).served_name,
        parameters=counted.parameters,
        read_parameters=counted.products,
        layer_parameters=counted.active - counted.head,
        head_parameters=counted.head,
        attention_width=shape.num_layers * heads * head_dim,
        weight_bits=bits,
        weight_bytes=int(counted.products * bits / 8 + counted.looked_up * model.dtype.itemsize),
        block_size=config.block_size,
        block_bytes=shape.block_bytes,
        expanded_block_bytes=shape.expanded_block_bytes,
        windows=shape.windows,
        state_bytes=shape.state_bytes,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(cache_dtype).removeprefix("torch."),
        context_length=model.context_length,
    )


def _directory(name: str) -> Path:
    """Return a directory with at least config.json."""
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent

    def stop(directory: Path) -> None:
        raise _Found(directory)

    try:
        return obtain_model(name, check=stop).directory
    except _Found as found:  # before any weights
        return found.directory


def _name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().parent.name if path.name == "config.json" else ModelSource.parse(model).served_name


@dataclass(frozen=True, slots=True)
class _Counted:
    parameters: int
    products: int
    active: int
    head: int
    looked_up: int

    @classmethod
    def from_module(cls, module: Any, config: Any) -> _Counted:
        """Count the parameters of a module; shared tensors count once."""
        tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
        output = module.get_output_embeddings()
        head = output.weight if output is not None else None
        experts, per_token = _experts(config)
        total = products = active = looked_up = 0
        for name, parameter in module.named_parameters():
            count = parameter.numel()
            total += count
            if id(parameter) in tables:
                looked_up += count if parameter is not head else 0
                continue
            products += count
            is_expert = experts and ".experts." in name
            active += count * per_token // experts if is_expert else count
        if head is not None and id(head) in tables:  # tied: also a matmul, and counted as a table above
            products, active = products + head.numel(), active + head.numel()
        return cls(total, products, active, head.numel() if head is not None else 0, looked_up)


def _experts(config: Any) -> tuple[int, int]:
    """Return a layer's number of experts, and the number that a token selects; 0, 0 if there are none."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if isinstance(count := getattr(config, name, None), int) and count > 0:
            return count, min(count, getattr(config, "num_experts_per_tok", count) or count)
    return 0, 0


def _weight_bits(
    config: EngineConfig, raw: Mapping[str, Any], dtype: torch.dtype, packed: int | None
) -> float:
    """`packed`: the model's sizes on a device that packs weights losslessly."""
    if config.quantization is not None:
        return 8.0
    source = ModelSource.parse(config.model)
    if packed is not None and source.kind in ("packaged", "gguf"):
        file = find_gguf() if source.kind == "packaged" else Path(source.name).expanduser()
        return min(32.0, 8.0 * file.stat().st_size / packed)
    scheme = raw.get("quantization_config")
    if isinstance(scheme, Mapping):
        bits = _scheme_bits(scheme)
        return bits + (_SCALE_BITS if bits <= 4 else 0.0)
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    is_packed = packed is not None and stored in ("bfloat16", "float16")
    return 16.0 if is_packed else 8.0 * dtype.itemsize


def _scheme_bits(scheme: Mapping[str, Any]) -> float:
    """Return the bits of a quantized checkpoint's weights; 16 where its configuration does not specify it."""
    for name in ("bits", "w_bit", "num_bits"):
        if isinstance(scheme.get(name), int):
            return float(scheme[name])
    for group in (scheme.get("config_groups") or {}).values():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            return _scheme_bits(group["weights"])
    return 8.0 if str(scheme.get("quant_method")) in ("fp8", "fbgemm_fp8") else 16.0
