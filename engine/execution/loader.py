"""From a model's name to a module that attends through the paged cache."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution.attention import PAGED_ATTENTION
from engine.execution.kv_cache import KVCacheShape
from engine.execution.packaged_model import PACKAGED_MODEL, packaged_model_directory
from engine.tokenizer import generation_eos_token_ids

logger = logging.getLogger(__name__)

# Families whose modules go through transformers' attention interface, each with a token-exactness test.
SUPPORTED_MODEL_TYPES = ("gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")
# These choose their frequencies by the longest position of the batch: one request would change another's output.
_UNSUPPORTED_ROPE_TYPES = ("dynamic", "longrope")
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: torch.nn.Module
    directory: Path
    served_name: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str

    @property
    def num_heads(self) -> int:
        config: Any = self.module.config
        return int(config.num_attention_heads)

    def kv_cache_shape(self, block_size: int) -> KVCacheShape:
        config: Any = self.module.config
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        if config.model_type == "gpt_bigcode":
            num_kv_heads = 1 if config.multi_query else num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return KVCacheShape(config.num_hidden_layers, num_kv_heads, head_dim, block_size, self.dtype)


def model_directory(model: str) -> Path:
    """The directory of a model given by path or by packaged name. Raises `ModelLoadError`."""
    if model == PACKAGED_MODEL:
        return packaged_model_directory()
    directory = Path(model).expanduser()
    if not directory.is_dir():
        raise ModelLoadError(
            f"no model at {model!r}: give a Hugging Face model directory, {PACKAGED_MODEL!r} or 'echo'"
        )
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory} is no model directory: it has no config.json")
    return directory


def load_model(config: EngineConfig) -> LoadedModel:
    """Load weights onto the device, ready for a forward pass.

    Raises:
        ModelLoadError: no such model, an unsupported architecture or an unreadable checkpoint.
        ConfigError: the device asked for is not there.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    directory = model_directory(config.model)
    device = _resolve_device(config.device)
    try:
        model_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever the file made the parser raise
        raise ModelLoadError(f"can't read {directory / 'config.json'}: {error}") from error
    _check_supported(model_config)
    dtype = _resolve_dtype(config.dtype, model_config, device)
    module = _load_module(config, directory, model_config, dtype).to(device).eval()
    module.requires_grad_(False)
    return LoadedModel(
        module=module,
        directory=directory,
        served_name=config.model if config.model == PACKAGED_MODEL else directory.resolve().name,
        dtype=dtype,
        device=device,
        vocab_size=int(model_config.vocab_size),
        context_length=_context_length(model_config),
        eos_token_ids=tuple(generation_eos_token_ids(directory)),
        fingerprint=_fingerprint(directory, config, dtype, device),
    )


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device; use device=cpu")
    return torch.device(name)


def _resolve_dtype(name: str, model_config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cpu":
        return torch.float32  # half precision is emulated on most CPUs: slower and less exact
    declared = getattr(model_config, "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.bfloat16


def _check_supported(model_config: Any) -> None:
    if model_config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelLoadError(
            f"model type {model_config.model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    rope = getattr(model_config, "rope_parameters", None) or getattr(model_config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope_type in _UNSUPPORTED_ROPE_TYPES:
        raise ModelLoadError(f"rope type {rope_type!r} is not supported yet")


def _load_module(config: EngineConfig, directory: Path, model_config: Any, dtype: torch.dtype) -> Any:
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=PAGED_ATTENTION
        )
    if not any(directory.glob("*.safetensors")):
        raise ModelLoadError(f"{directory} has no *.safetensors weights (load_format='dummy' needs none)")
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=PAGED_ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # a truncated file, wrong shapes, missing shards: all end the start
        raise ModelLoadError(f"can't load the weights in {directory}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers and a log line
        raise ModelLoadError(
            f"can't load the weights in {directory}: {len(missing)} tensors are missing, {missing[0]} first"
        )
    return module


def _context_length(model_config: Any) -> int:
    for name in _CONTEXT_FIELDS:
        value = getattr(model_config, name, None)
        if isinstance(value, int):
            return value
    raise ModelLoadError(f"{model_config.model_type} config.json states no context length")


def _fingerprint(directory: Path, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Tells whether two engines compute the same function: checkpoints may only be continued where it matches."""
    digest = hashlib.sha256()
    digest.update((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as weights:
            # The ends and the middle: all of it would cost a second per gigabyte at every start.
            for at in (0, file.stat().st_size // 2, max(0, file.stat().st_size - 2**20)):
                weights.seek(at)
                digest.update(weights.read(2**20))
    settings = (config.load_format, config.seed if config.load_format == "dummy" else 0, config.quantization,
                config.kv_cache_dtype, str(dtype), device.type)  # fmt: skip
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()[:16]
