"""The vision modules of a multimodal checkpoint: transformers' modules, without the language model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.library import model_class
from pagemill.engine.layers.positions.sections import RotarySections
from pagemill.engine.models.checkpoint import read_config, read_scheme, read_tensors, weight_files
from pagemill.engine.models.families.family import native_config
from pagemill.engine.models.families.multimodal import MULTIMODAL, text_name
from pagemill.engine.models.loader import built_on_the_cpu
from pagemill.engine.models.quantized.reader import join_parts, placeholders, widened

logger = logging.getLogger(__name__)

_CLASSES = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"
_LANGUAGE_MODELS = ("language_model", "text_model")
_OF_LANGUAGE = (r"^(model\.)?(language_model|text_model)\.", r"(^|\.)lm_head\.")


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision tower and projector of a model."""

    module: Any
    """transformers' `...Model`, whose language model is empty. It has `get_image_features`."""
    placeholder_id: int
    """The token that represents a vector of a picture."""
    hidden_size: int
    num_deep_layers: int
    """Number of decoder layers after which further vectors of pictures are added (DeepStack)."""
    sections: RotarySections | None
    """The position, of three, that each rotary frequency uses; None: there is one position."""


def load_vision(config: EngineConfig, directory: Path, dtype: torch.dtype, device: DeviceBackend) -> Vision:
    """Load the vision modules onto the device. Raises `ModelLoadError` with the reason."""
    raw = read_config(directory)
    row = MULTIMODAL.get(str(raw.get("model_type")))
    if row is None:
        raise ModelLoadError("the model does not read images")
    if not row.images:
        raise ModelLoadError(f"images of model type {row.model_type!r} are not supported")
    if config.tensor_parallel_size > 1:
        raise ModelLoadError(
            f"images with tensor_parallel_size={config.tensor_parallel_size} are not supported"
        )
    try:
        model_config: Any = native_config(raw)
        text = model_config.get_text_config(decoder=True)
        module = _loaded(config, directory, model_config, dtype).eval().requires_grad_(False)
        sections = RotarySections.from_decoder(
            module.get_decoder(), device.device, is_interleaved=row.interleaved
        )
        for name in _LANGUAGE_MODELS:
            if hasattr(module.model, name):
                setattr(module.model, name, torch.nn.Identity())
        inner = module.model.to(device.device)
        return Vision(
            module=inner,
            placeholder_id=int(model_config.image_token_id),
            hidden_size=int(text.hidden_size),
            num_deep_layers=len(getattr(model_config.vision_config, "deepstack_visual_indexes", ())),
            sections=sections,
        )
    except Exception as error:  # the files can make transformers' code raise anything
        message = f"the part of the model that reads images can't be loaded: {' '.join(str(error).split())}"
        logger.warning("%s: texts are served, images are rejected: %s", directory, message)
        raise ModelLoadError(message) from error


def _loaded(config: EngineConfig, directory: Path, model_config: Any, dtype: torch.dtype) -> Any:
    text = model_config.get_text_config(decoder=True)
    text.num_hidden_layers = 1  # of the language model, which is dropped
    model_config.tie_word_embeddings = text.tie_word_embeddings = False
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    module_class: Any = model_class(_CLASSES, model_config)
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        module = module_class._from_config(model_config, **options)
    else:
        scheme = read_scheme(directory)
        tensors = read_tensors(weight_files(directory), lambda name: None if text_name(name) else name)
        if scheme is not None:
            tensors = widened(join_parts(tensors, scheme, dtype))
        module, report = _without_initial_values(module_class).from_pretrained(
            None,
            config=model_config,
            state_dict=placeholders(tensors),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        wrong = sorted(report["missing_keys"]) + sorted(name for name, *_ in report["mismatched_keys"])
        if wrong:
            raise ModelLoadError(f"{len(wrong)} tensors are missing or have another shape, {wrong[0]} first")
        module.__class__ = module_class
    return module


def _without_initial_values(module_class: Any) -> Any:
    """Return a class that leaves tensors missing in the files (the language model's) as untouched memory."""

    class WithoutInitialValues(built_on_the_cpu(module_class)):  # type: ignore[misc]
        _keys_to_ignore_on_load_missing = _OF_LANGUAGE

        def _initialize_missing_keys(self, *arguments: Any, **options: Any) -> None:
            unread = [self.lm_head, *(getattr(self.model, name, None) for name in _LANGUAGE_MODELS)]
            for part in (part for parent in unread if parent is not None for part in parent.modules()):
                for one in (part, *part.parameters(recurse=False)):
                    one._is_hf_initialized = True
            super()._initialize_missing_keys(*arguments, **options)

    WithoutInitialValues.__name__ = module_class.__name__
    WithoutInitialValues.__module__ = module_class.__module__
    return WithoutInitialValues
