"""Loads a model for vectors or scores into a module that attends within packed texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.backend import DeviceBackend, HostCopy
from pagemill.engine.errors import ConfigError, ModelLoadError
from pagemill.engine.layers.library import model_class
from pagemill.engine.layers.linear import LinearOptions, replace_linears
from pagemill.engine.layers.packed_attention import PACKED_ATTENTION, PackedTexts, packed_texts
from pagemill.engine.models.checkpoint import read_config, read_tensors, weight_files
from pagemill.engine.models.families.family import native_config
from pagemill.engine.models.loader import fill_module, model_fingerprint, resolve_dtype
from pagemill.engine.pooling.families import PoolingFamily, find_pooling_family
from pagemill.engine.pooling.folder import ClassifierFolder, EmbedderFolder, PoolingFolder
from pagemill.engine.pooling.heads import ACTIVATIONS, LabelHead, VectorHead
from pagemill.engine.tasks import PoolingKind
from pagemill.kernels.types.transfer import to_device

logger = logging.getLogger(__name__)

_UNUSED = (".position_ids", ".token_type_ids")
"""Constants that older versions saved with the weights."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Concatenated texts, with those of equal length adjacent."""

    token_ids: np.ndarray[Any, np.dtype[np.int64]]
    lengths: list[int]
    types: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, np.int64))
    """Token types; empty: all 0."""


@dataclass(slots=True)
class PoolingModel:
    """A loaded model. `launch` runs on the thread that owns it."""

    base: Any
    """One of transformers' encoders or decoders, without a head."""
    head: VectorHead | LabelHead
    folder: PoolingFolder
    family: PoolingFamily
    device: DeviceBackend
    dtype: torch.dtype
    context_length: int
    """Maximum number of tokens of a text."""
    vocab_size: int
    padding_id: int | None
    fingerprint: str

    @torch.inference_mode()
    def launch(self, batch: PackedBatch, num_skipped: int = 0) -> HostCopy:
        """Start computing a batch; its one tensor, [num_texts, width] in fp32, has vectors or logits."""
        device = self.device.device
        texts = PackedTexts.from_lengths(batch.lengths, device)
        ends = np.cumsum(batch.lengths)
        inputs: dict[str, Any] = {
            "input_ids": batch.token_ids,
            "position_ids": self._positions(batch, ends - batch.lengths),
        }
        if len(batch.types) and self.family.takes_types:
            inputs["token_type_ids"] = batch.types
        elif self.family.takes_types:
            inputs["token_type_ids"] = np.zeros_like(batch.token_ids)
        with packed_texts(texts):
            on_device = {name: to_device(values, device)[None] for name, values in inputs.items()}
            hidden = self.base(**on_device, **({"use_cache": False} if self.family.is_causal else {}))
        states = hidden.last_hidden_state[0]
        if isinstance(self.head, VectorHead):
            rows = self.head(states, texts, num_skipped)
        else:
            rows = self.head(states, texts, to_device(self._last_tokens(batch, ends), device))
        return self.device.to_host([rows])

    def _positions(self, batch: PackedBatch, starts: Any) -> Any:
        """Return each token's position in its text."""
        if not self.family.padding_offset:
            return np.arange(len(batch.token_ids)) - np.repeat(starts, batch.lengths)
        padding = int(self.base.embeddings.padding_idx)
        is_token = batch.token_ids != padding
        counted = np.cumsum(is_token)
        before = np.repeat(counted[starts] - is_token[starts], batch.lengths)
        return (counted - before) * is_token + padding

    def _last_tokens(self, batch: PackedBatch, ends: Any) -> Any:
        last = np.asarray(ends - 1, np.int64)
        if self.padding_id is None:
            return last
        for number, (end, length) in enumerate(zip(ends, batch.lengths, strict=True)):
            real = np.flatnonzero(batch.token_ids[end - length : end] != self.padding_id)
            last[number] = end - length + (real[-1] if len(real) else 0)
        return last

    def finish(self, rows: torch.Tensor, kind: PoolingKind, dimensions: int | None) -> torch.Tensor:
        """Convert a request's rows to its result: fewer dimensions, probabilities, or a score."""
        folder = self.folder
        if isinstance(folder, EmbedderFolder):
            if dimensions is None or dimensions == rows.shape[1]:
                return rows
            cut = rows[:, :dimensions]
            return torch.nn.functional.normalize(cut, dim=-1) if folder.normalizes else cut
        if kind == "rerank":
            return ACTIVATIONS[folder.pair_activation](rows)
        if folder.is_multi_label:
            return rows.sigmoid()
        return rows.softmax(dim=-1) if len(folder.labels) > 1 else rows


def load_pooling_model(config: EngineConfig, folder: PoolingFolder, device: DeviceBackend) -> PoolingModel:
    """Load the weights onto the device.

    Raises:
        ModelLoadError: the architecture is not supported, or the checkpoint is unreadable.
        ConfigError: a setting is only supported for models that generate.
    """
    for name, default in (("tensor_parallel_size", 1), ("load_format", "auto"), ("batch_invariant", False)):
        if getattr(config, name) != default:
            message = f"{name}={getattr(config, name)!r}: a model for vectors or scores has no such setting"
            raise ConfigError(message, setting=name)
    directory = folder.transformer
    raw = read_config(directory)
    family = find_pooling_family(raw.get("model_type"))
    try:
        model_config: Any = native_config(raw)
    except Exception as error:  # the file can make transformers' validation raise anything
        raise ModelLoadError(f"can't read {directory / 'config.json'}: {error}") from error
    if not family.is_causal and getattr(model_config, "is_decoder", False):
        raise ModelLoadError(f"{directory}: an encoder with is_decoder is not supported")
    dtype = resolve_dtype(config, model_config, device)
    device.check(config, dtype)
    if isinstance(folder, ClassifierFolder):
        model_config.num_labels = len(folder.labels)
    module = _load_module(folder, model_config, device.module_dtype(dtype))
    base = module if isinstance(folder, EmbedderFolder) else module.base_model
    module = module.to(device.device).eval().requires_grad_(False)
    # After `to`: tensors that it computes in advance are not buffers, and would not be moved.
    family.adapt(base)
    matmul = device.choose_matmul(config, base, dtype)
    options = LinearOptions(config.quantization, dtype=dtype, matmul=matmul)
    replace_linears(base, partial(device.product, options=options))
    head: VectorHead | LabelHead
    if isinstance(folder, EmbedderFolder):
        head = VectorHead(folder, int(model_config.hidden_size)).to(device.device, device.module_dtype(dtype))
    else:
        head = LabelHead(folder, family, module)
    context = int(model_config.max_position_embeddings)
    if family.padding_offset:
        context -= int(base.embeddings.padding_idx) + 1
    return PoolingModel(
        base=base,
        head=head,
        folder=folder,
        family=family,
        device=device,
        dtype=dtype,
        context_length=context,
        vocab_size=int(model_config.vocab_size),
        padding_id=model_config.pad_token_id,
        fingerprint=model_fingerprint(directory, config, dtype, device, 0, matmul=matmul),
    )


def _load_module(folder: PoolingFolder, model_config: Any, dtype: torch.dtype) -> Any:
    is_embedder = isinstance(folder, EmbedderFolder)
    mapping = "MODEL_MAPPING" if is_embedder else "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
    wanted = model_class(mapping, model_config)
    stored = read_tensors(weight_files(folder.transformer))
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_UNUSED)}
    options = {"dtype": dtype, "attn_implementation": "eager"}
    optional = "pooler" if is_embedder else None
    try:
        module = fill_module(wanted, model_config, tensors, options, optional=optional)
    except Exception as error:  # inconsistent sizes and shapes: all of them end startup
        raise ModelLoadError(f"can't load the weights in {folder.transformer}: {error}") from error
    # Set only now, for the masks: transformers does not create masks for an unknown implementation.
    module.config._attn_implementation = PACKED_ATTENTION
    if is_embedder and getattr(module, "pooler", None) is not None:
        module.pooler = None
    return module
