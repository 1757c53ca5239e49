"""The metrics of images in prompts."""

from __future__ import annotations

from pagemill.engine.outputs import EngineStats
from pagemill.monitoring.metrics.metric import Metric, counter, gauge

MEDIA: tuple[Metric[EngineStats], ...] = (
    counter(
        "images_encoded_total", "Images that the model's vision encoder read.", lambda s: s.media.encoded
    ),
    counter(
        "image_cache_hits_total",
        "Images of requests that were encoded already.",
        lambda s: s.media.cache_hits,
    ),
    counter("image_encoder_seconds_total", "Time of the vision encoder.", lambda s: s.media.encoder_seconds),
    gauge("image_cache_bytes", "Bytes of encoded images in memory.", lambda s: s.media.used_bytes),
)
