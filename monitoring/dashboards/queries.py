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


def series(metric: str, selector: str = WORKER) -> str:
    """The expression of a metric, one series per worker and label."""
    return f"pagemill_{metric}{{{selector}}}"


def rate(metric: str, selector: str = WORKER) -> str:
    """The expression of a counter's rate, one series per worker and label."""
    return f"rate({series(metric, selector)}[$__rate_interval])"


def once(expr: str, labels: str = "") -> str:
    """An expression by queue and `labels`. Every worker of a queue exports the same value: count it once."""
    return f"max by ({f'queue, {labels}' if labels else 'queue'}) ({expr})"


def rate_by(label: str, metric: str, legend: str | None = None, selector: str = WORKER) -> Query:
    """A counter's rate by one of its labels, summed over the chosen workers."""
    return Query(
        f"sum by ({label}) ({rate(metric, selector)})",
        _placeholder(label) if legend is None else legend,
    )


def total_rate(metric: str, legend: str = "", selector: str = WORKER) -> Query:
    """A counter's rate, summed over the chosen workers and all labels."""
    return Query(f"sum({rate(metric, selector)})", legend)


def gauge(metric: str, legend: str = "{{instance}}", selector: str = WORKER) -> Query:
    """A gauge of each chosen worker."""
    return Query(series(metric, selector), legend)


def gauge_by(label: str, metric: str, legend: str | None = None) -> Query:
    """A gauge by one of its labels, summed over the chosen workers."""
    return Query(f"sum by ({label}) ({series(metric)})", _placeholder(label) if legend is None else legend)


def total(metric: str, legend: str = "") -> Query:
    """A gauge, summed over the chosen workers."""
    return Query(f"sum({series(metric)})", legend)


def of_queue(metric: str, legend: str, labels: str = "") -> Query:
    """A gauge of each chosen queue, by `labels` if any."""
    return Query(once(series(metric, QUEUE), labels), legend)


def queue_total(label: str, metric: str) -> Query:
    """A gauge of queues by one of its labels, summed over the chosen queues."""
    return Query(f"sum by ({label}) ({once(series(metric, QUEUE), label)})", _placeholder(label))


def quantile(metric: str, q: float, legend: str, labels: str = "le", selector: str = WORKER) -> Query:
    """A quantile of a histogram over the chosen workers; `labels`: `le`, and labels to preserve."""
    return Query(f"histogram_quantile({q}, sum by ({labels}) ({rate(metric + '_bucket', selector)}))", legend)


def quantiles(metric: str, *which: float, selector: str = WORKER) -> list[Query]:
    """Quantiles of a histogram over the chosen workers, named p50 and the like."""
    return [quantile(metric, q, f"p{q * 100:.0f}", selector=selector) for q in which]


def _placeholder(label: str) -> str:
    return f"{{{{{label}}}}}"
