"""A scraper that requests OpenMetrics gets it, with the same values as in the text format."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from pagemill.monitoring.metrics.metric import choose_encoding
from pagemill.monitoring.queue_figures import QueueFigures
from pagemill.producer.gateway.metrics import GatewayMetrics
from tests.monitoring.snapshots import engine_stats, metrics

QUEUE = QueueFigures(queue="default", taken_at=1.0, waiting={("m", "normal"): 1})


def gateway() -> GatewayMetrics:
    found = GatewayMetrics()
    found.finished("/v1/completions", "POST", 200, 0.3)
    return found


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=values",
        "application/openmetrics-text;version=1.0.0;escaping=underscores",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    ],
)
def test_openmetrics_has_the_numbers_of_the_text_format(accept: str) -> None:
    encode, content_type = choose_encoding(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    watched = metrics(engine_stats(), QUEUE, vllm_names=True)
    assert b"vllm:generation_tokens_total" in watched.render(encode)
    for text, opened in (
        (watched.render(), watched.render(encode)),
        (gateway().exposition(), gateway().exposition(encode)),
    ):
        assert opened.endswith(b"# EOF\n")
        assert names(read_openmetrics(opened.decode())) == names(read_text(text.decode()))


def names(families: object) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families  # type: ignore[attr-defined]
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain", "text/html;version=x", "application/openmetrics-text;version=x"]
)
def test_others_get_the_text_format(accept: str) -> None:
    encode, content_type = choose_encoding(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert encode is generate_latest
