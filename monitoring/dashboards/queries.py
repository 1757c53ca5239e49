"""The panels' queries: selectors and common shapes."""

from __future__ import annotations

from dataclasses import dataclass

WORKER = 'instance=~"$worker"'
QUEUE = 'queue=~"$queue"'
GATEWAY = 'instance=~"$gateway"'
LANE = 'queue=~"$queue", model=~"$model"'


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


def rate(metric: str, selector: str = WORKER) -> str:
    """The expression of a counter's rate, one series per worker and label."""
    return f"rate(pagemill_{metric}{{{selector}}}[$__rate_interval])"


def rate_by(label: str, metric: str, legend: str | None = None, selector: str = WORKER) -> Query:
    """A counter's rate by one of its labels, summed over the chosen workers."""
    return Query(f"sum by ({label}) ({rate(metric, selector)})", _named(label) if legend is None else legend)


def total_rate(metric: str, legend: str = "", selector: str = WORKER) -> Query:
    """A counter's rate, summed over the chosen workers and all labels."""
    return Query(f"sum({rate(metric, selector)})", legend)


def gauge(metric: str, legend: str = "{{instance}}", selector: str = WORKER) -> Query:
    """A gauge of each chosen worker."""
    return Query(f"pagemill_{metric}{{{selector}}}", legend)


def gauge_by(label: str, metric: str, legend: str | None = None) -> Query:
    """A gauge by one of its labels, summed over the chosen workers."""
    return Query(
        f"sum by ({label}) (pagemill_{metric}{{{WORKER}}})", _named(label) if legend is None else legend
    )


def total(metric: str, legend: str = "") -> Query:
    """A gauge, summed over the chosen workers."""
    return Query(f"sum(pagemill_{metric}{{{WORKER}}})", legend)


def of_queue(metric: str, legend: str) -> Query:
    """A figure of each chosen queue. Every worker of a queue exports the same one, so it is taken once."""
    return Query(f"max by (queue) (pagemill_{metric}{{{QUEUE}}})", legend)


def quantiles(metric: str, *which: float, selector: str = WORKER) -> list[Query]:
    """Quantiles of a histogram over the chosen workers."""
    buckets = f"sum by (le) ({rate(metric + '_bucket', selector)})"
    return [Query(f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in which]


def _named(label: str) -> str:
    return f"{{{{{label}}}}}"
