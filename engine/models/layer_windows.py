"""The attention window of each layer of a registered family's model."""

from __future__ import annotations

from typing import Any

from pagemill.engine.layers.decoder_traits import DecoderTraits


def layer_windows(module: Any, traits: DecoderTraits | None) -> tuple[int | None, ...]:
    """Return the window of each layer; None: the layer may read everything.

    None is always safe. If a layer does not respect its window, it is rejected when it attends
    (`pagemill.engine.layers.attention`).
    """
    count: int = module.config.num_hidden_layers
    if traits is not None and traits.window == "one":
        window: int | None = getattr(module.config, "sliding_window", None)
        return (window,) * count
    found: list[set[int | None]] = [set() for _ in range(count)]
    for part in module.modules():
        layer = getattr(part, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < count:
            continue
        scoring = getattr(part, "scoring", None)
        if scoring is not None:
            found[layer].add(scoring.sliding_window)
        elif hasattr(part, "sliding_window"):
            found[layer].add(part.sliding_window)
    return tuple(windows.pop() if len(windows) == 1 else None for windows in found)
