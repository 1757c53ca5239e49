"""Makes transformers' decoder modules follow a step's media: rotation by three positions, and DeepStack."""

from __future__ import annotations

from typing import Any

import torch

from pagemill.engine.layers.attention import find_context
from pagemill.engine.layers.media_step import MediaStep
from pagemill.engine.layers.positions.sections import RotarySections


def read_media_steps(module: Any, num_deep_layers: int, sections: RotarySections | None) -> None:
    """Make a decoder's original modules follow the current step's `MediaStep`, if there is one."""
    decoder = module.model
    if sections is not None:
        decoder.rotary_emb.register_forward_hook(_rotate_by_sections, with_kwargs=True)
    for index, layer in enumerate(decoder.layers[:num_deep_layers]):
        layer.register_forward_hook(_deepened(index))


def _current() -> MediaStep | None:
    context = find_context()
    return None if context is None else context.media


def _rotate_by_sections(module: Any, arguments: Any, named: Any, output: Any) -> Any:
    media = _current()
    if media is None or media.positions is None or media.sections is None:
        return None
    states = arguments[0] if arguments else named["x"]
    given = arguments[1] if len(arguments) > 1 else named["position_ids"]
    # Qwen3.5's rotation expects three positions, others one: here all of a call are equal.
    angles = [module.forward(states, positions.expand(given.shape)) for positions in media.positions]
    return tuple(media.sections.combine(of_axes) for of_axes in zip(*angles, strict=True))


def _deepened(index: int) -> Any:
    def hook(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
        media = _current()
        return None if media is None else media.add_deep(index, output[0])[None]

    return hook
