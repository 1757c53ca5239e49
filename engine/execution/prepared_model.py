"""A model in its final form: modules rewritten for the device and compared with transformers'."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pagemill.engine.adapters.layers import AdaptedLayers
from pagemill.engine.config import EngineConfig
from pagemill.engine.execution.model_probe import ModelProbe
from pagemill.engine.layers.direct_forward import DirectForward
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.latent.absorbed import absorb_products
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.layers.part_report import describe_parts
from pagemill.engine.models.loader import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A loaded model whose weights have their final layout and memory."""

    loaded: LoadedModel
    direct: DirectForward | None
    """Replaces transformers' forward."""
    parts: str
    """Description of how each part runs."""
    adapters: AdaptedLayers | None
    """The layers that adapters can change; None: adapters are not supported."""

    @classmethod
    def from_model(
        cls, model: LoadedModel, config: EngineConfig, shape: KVCacheShape, max_model_len: int
    ) -> PreparedModel:
        """Rewrite the model in place. Raises `ModelLoadError` if its logits then differ from transformers'."""
        probe = ModelProbe.from_model(model, config, max_model_len)
        direct, parts = rewrite(model, config)
        logger.info("%s: %s", model.served_name, parts)
        model.device.warm_up(model.module, model.dtype, model.num_heads, shape)
        if probe is not None:
            probe.check(shape)
        adapters = None
        if config.tensor_parallel_size == 1:
            adapters = AdaptedLayers(
                model.module, model.family, model.directory, model.device.warm_up_adapters,
                num_slots=config.adapter_slots, max_rank=config.max_adapter_rank,
            )  # fmt: skip
        return cls(model, direct, parts, adapters)


def rewrite(model: LoadedModel, config: EngineConfig) -> tuple[DirectForward | None, str]:
    """Let the device replace modules; returns its forward pass, if any, and a report of how each part runs."""
    linear = LinearOptions(config.quantization, config.batch_invariant, model.dtype, model.matmul)
    traits = model.family.decoder
    if model.attention is not None and model.attention.latent is not None:
        absorb_products(model.module)
    model.device.fuse(model.module, traits, model.dtype, linear)
    direct = DirectForward.from_module(model.module, traits)
    return direct, describe_parts(model.module, is_direct=direct is not None)
