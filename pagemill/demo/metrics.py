"""The demo's readings of the worker's /metrics while a batch runs: tokens and KV blocks."""

from __future__ import annotations

import contextlib
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass

INTERVAL_S = 0.1
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and KV blocks between the sampler's start and now."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    generated_tokens: int = 0
    peak_kv_utilization: float = 0.0
    """Maximum of any step since the worker started."""
    mean_kv_utilization: float = 0.0
    """Mean over the engine's steps."""
    steps: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class MetricsSampler:
    """Reads /metrics every tenth of a second on a separate thread. A context manager."""

    def __init__(self, metrics_url: str) -> None:
        self._url = metrics_url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-metrics", daemon=True)
        self._first = self._scrape()
        self._last = self._first

    def __enter__(self) -> MetricsSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)

    def usage(self) -> Usage:
        steps = self._gain("pagemill_kv_cache_step_utilization_ratio_count")
        return Usage(
            prompt_tokens=int(self._gain("pagemill_prompt_tokens_total")),
            cached_tokens=int(self._gain("pagemill_prefix_cache_hit_tokens_total")),
            generated_tokens=int(self._gain("pagemill_generated_tokens_total")),
            peak_kv_utilization=self._last.get("pagemill_kv_cache_peak_utilization_ratio", 0.0),
            mean_kv_utilization=self._gain("pagemill_kv_cache_step_utilization_ratio_sum") / max(steps, 1.0),
            steps=int(steps),
        )

    def sample(self) -> None:
        """Read now. After a failed scrape the last reading remains: the demo is not about the network."""
        with contextlib.suppress(urllib.error.URLError, TimeoutError):
            self._last = self._scrape()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.sample()

    def _gain(self, name: str) -> float:
        return self._last.get(name, 0.0) - self._first.get(name, 0.0)

    def _scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(self._url, timeout=TIMEOUT_S) as response:
            return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    """The unlabeled samples of a Prometheus text page."""
    samples = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name and not name.startswith("#") and "{" not in name:
            samples[name] = float(value.split()[0])
    return samples
