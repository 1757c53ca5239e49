"""The metrics of images in prompts."""

from __future__ import annotations

from pagemill.engine.outputs import EngineStats
from pagemill.monitoring.metrics.metric import Metric, counter, gauge

MEDIA: tuple[Metric[EngineStats], ...] = (
    counter(
        "images_encoded_total",
        "Number of images that the model's vision encoder read.",
        lambda s: s.media.encoded,
    ),
    counter(
        "image_cache_hits_total",
        "Number of images of requests that were already encoded.",
        lambda s: s.media.cache_hits,
    ),
    counter(
        "image_encoder_seconds_total",
        "Time spent in the vision encoder, in seconds.",
        lambda s: s.media.encoder_seconds,
    ),
    gauge("image_cache_bytes", "Size of encoded images in memory, in bytes.", lambda s: s.media.used_bytes),
)
