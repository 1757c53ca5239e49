"""Assembles an engine for a model for vectors or scores."""

from __future__ import annotations

import logging

from torch import nn

from pagemill.common.fingerprint import with_commit
from pagemill.engine.config import EngineConfig, SchedulerConfig, resolve_max_model_len
from pagemill.engine.devices.registry import find_device
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.json_files import read_json_object
from pagemill.engine.layers.linear import Linear
from pagemill.engine.models.directory import LocalModel
from pagemill.engine.pooling.engine import WAITING_STEPS, PoolingEngine, PoolingParts
from pagemill.engine.pooling.folder import EmbedderFolder, PoolingFolder
from pagemill.engine.pooling.input_processor import PoolingInputProcessor, PoolingLimits
from pagemill.engine.pooling.loader import PoolingModel, load_pooling_model
from pagemill.engine.text.text_encoder import TextEncoder
from pagemill.engine.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_BATCH_FACTOR = 4
"""Factor of a batch's tokens relative to a generation step: no client waits for the next token."""
_MAX_REQUESTS = 256


def build_pooling_engine(config: EngineConfig, source: LocalModel, folder: PoolingFolder) -> PoolingEngine:
    """Load the model of a directory. Raises `ConfigError`, mostly `ModelLoadError`."""
    device = find_device(config.device)
    device.tune_process(config.num_threads)
    model = load_pooling_model(config, folder, device)
    max_model_len = resolve_max_model_len(config, _longest_text(model, folder), model.context_length)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(folder.transformer)
    defaults = device.step_defaults
    budget = config.max_num_batched_tokens or _BATCH_FACTOR * defaults.max_num_batched_tokens
    limits = SchedulerConfig(
        block_size=1,
        num_kv_blocks=WAITING_STEPS * max(budget, max_model_len),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or _MAX_REQUESTS,
        max_num_batched_tokens=budget,
        depth=int(defaults.overlapped if config.async_scheduling is None else config.async_scheduling),
    )
    processor = PoolingInputProcessor(
        _encoder(tokenizer, folder), folder, PoolingLimits(model.vocab_size, max_model_len), model.head.width
    )
    parts = PoolingParts(
        model=model,
        input_processor=processor,
        tokenizer=tokenizer,
        limits=limits,
        served_models=config.served_model_name or (source.source.served_name,),
        fingerprint=with_commit(model.fingerprint, source.commit),
        # In half precision a text's results depend on the batch.
        tier="token" if model.dtype.itemsize == 4 else "continues",
        device=str(model.device.device),
        weight_bytes=_weight_bytes(model.base),
        model_parts=_describe_parts(model),
    )
    logger.info(
        "%s on %s serves %s, texts of up to %d tokens in batches of %d; %s",
        parts.served_models[0],
        device.device,
        " and ".join(processor.kinds),
        max_model_len,
        budget,
        parts.model_parts,
    )
    return PoolingEngine(parts)


def _longest_text(model: PoolingModel, folder: PoolingFolder) -> int:
    """Return the limit on a text's tokens: the directory's, otherwise the tokenizer's, within the context."""
    longest = folder.max_seq_length
    file = folder.transformer / "tokenizer_config.json"
    if longest is None and file.is_file():
        said = read_json_object(file).get("model_max_length")
        longest = int(said) if isinstance(said, int | float) and said >= 1 else None
    return min(longest or model.context_length, model.context_length)


def _encoder(tokenizer: Tokenizer | None, folder: PoolingFolder) -> TextEncoder | None:
    if tokenizer is None:
        return None
    content = tokenizer.to_json()
    if content is None:
        raise ModelLoadError(
            f"{folder.transformer}: the tokenizer is not a fast one; convert it to a tokenizer.json, or serve token "
            "ids (skip_tokenizer_init)"
        )
    return TextEncoder(
        content,
        gives_types=getattr(tokenizer, "gives_types", False),
        is_limited=getattr(tokenizer, "is_limited", False),
    )


def _weight_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def _describe_parts(model: PoolingModel) -> str:
    own = any(
        isinstance(part, Linear) and not isinstance(part.product, nn.Linear) for part in model.base.modules()
    )
    way = "fused" if own else "transformers' own"
    kind = "vectors" if isinstance(model.folder, EmbedderFolder) else "labels"
    return f"{kind}: packed texts; linear layers: {way}"
