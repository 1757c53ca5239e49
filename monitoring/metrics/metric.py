"""The definition of a metric: a name, a help text, and a reader of its value from a snapshot.

`catalogue.py` lists them all; the tables are in the other files of this package. No counter is incremented here: every
value is read from a snapshot at scrape time, so that a scrape is consistent and the step loop never calls a metrics
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Generic, Literal, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pagemill.engine.outputs import EngineStats, HistogramSnapshot

PREFIX = "pagemill_"
ALLOWUTF8 = "allow-utf-8"
_KEEP_VALID_NAMES = ("underscores", "values")
"""The escaping schemes that do not change a valid name."""
Encode = Callable[[Collector], bytes]
"""Writes an exposition, in one of Prometheus' formats."""

Source = TypeVar("Source")
Key = TypeVar("Key", bound=str)
Labels = tuple[str, ...]
Number = float | bool
Reading = (
    Number
    | HistogramSnapshot
    | Mapping[str, Number | HistogramSnapshot]
    | Mapping[Labels, Number]
    | Mapping[Labels, HistogramSnapshot]
)
"""One value; or one per value of the only label; or one per combination of several."""
Figure = Number | None | Mapping[str, Number] | Mapping[Labels, Number]
"""Like `Reading`, before common labels are added; None: unknown, thus no sample."""


def choose_encoding(accept: str) -> tuple[Encode, str]:
    """Choose a format that the scraper accepts.

    Args:
        accept: the request's Accept header, or nothing.

    Returns:
        The writer of OpenMetrics if requested, otherwise of the text format; and its content type.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a number
        return choose_encoder("")
    # prometheus-client 0.26 replaces the colons of valid names in OpenMetrics. No name here needs to be escaped.
    if isinstance(encode, partial) and encode.keywords.get("escaping") in _KEEP_VALID_NAMES:
        encode = partial(encode, escaping=ALLOWUTF8)
    return encode, content_type


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """One metric family and the function that reads its samples from a snapshot."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    """Without the prefix; in base units; a counter ends in `_total`."""
    help: str
    read: Callable[[Source], Reading]
    labels: Labels = ()
    prefix: str = PREFIX

    def family(self, source: Source | None) -> Family:
        """Return the family with the samples of `source`; with None, only name, type and help."""
        family = _new_family(self.kind, self.prefix + self.name, self.help, self.labels)
        if source is not None:
            reading = self.read(source)
            children = reading.items() if isinstance(reading, Mapping) else [((), reading)]
            for key, value in children:
                _add_sample(family, (key,) if isinstance(key, str) else key, value)
        return family


def gauge(name: str, help: str, read: Callable[[Source], Reading], *labels: str) -> Metric[Source]:
    return Metric("gauge", name, help, read, labels)


def counter(name: str, help: str, read: Callable[[Source], Reading], *labels: str) -> Metric[Source]:
    return Metric("counter", name, help, read, labels)


def histogram(name: str, help: str, read: Callable[[Source], Reading], *labels: str) -> Metric[Source]:
    return Metric("histogram", name, help, read, labels)


def engine_histogram(name: str, help: str, source: str, *labels: str) -> Metric[EngineStats]:
    """Define the metric of histogram `source` in `EngineStats.histograms`."""
    return histogram(name, help, lambda stats: stats.histograms.get(source, {}), *labels)


def one_of(current: str, values: tuple[str, ...]) -> dict[str, Number]:
    """Return a state set: 1 for the current value, 0 for every other."""
    return {value: value == current for value in values}


def labeled(labels: Labels, figure: Figure) -> Mapping[Labels, Number]:
    """Return the samples of a metric with `labels` in front of its own labels."""
    if figure is None:
        return {}
    if not isinstance(figure, Mapping):
        return {labels: figure}
    return {(*labels, *((key,) if isinstance(key, str) else key)): value for key, value in figure.items()}


def each(values: Mapping[Key, Number], keys: Iterable[Key]) -> dict[str, Number]:
    """Return the value of every key, 0 where `values` has none: its series exist from the first scrape."""
    return {key: values.get(key, 0) for key in keys}


def _new_family(kind: str, name: str, help: str, labels: Labels) -> Family:
    if kind == "gauge":
        return GaugeMetricFamily(name, help, labels=labels)
    if kind == "counter":
        return CounterMetricFamily(name, help, labels=labels)
    return HistogramMetricFamily(name, help, labels=labels)


def _add_sample(family: Family, labels: Labels, value: Number | HistogramSnapshot) -> None:
    if isinstance(value, HistogramSnapshot):
        assert isinstance(family, HistogramMetricFamily)
        bounds = [*(_bound(bound) for bound in value.bounds), "+Inf"]
        cumulative = accumulate(value.counts)
        family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), value.total)
    else:
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric(labels, float(value))


def _bound(bound: float) -> str:
    """Format `le` like Prometheus' clients, so that 1 and 1.0 are the same series."""
    return repr(float(bound))
