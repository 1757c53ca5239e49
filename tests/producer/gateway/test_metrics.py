"""The gateway's exposition holds every metric of its table, with the label values that the reference page names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pagemill.monitoring.metrics.gateway import GATEWAY_METRICS
from pagemill.monitoring.metrics.metric import PREFIX
from pagemill.producer.gateway.metrics import GatewayMetrics
from tests.monitoring.prometheus_server import promtool


def exposition() -> str:
    """With every series that needs an event."""
    metrics = GatewayMetrics()
    metrics.finished("/v1/completions", "POST", 200, 0.3)
    metrics.first_token_seconds.observe(0.1)
    return metrics.exposition().decode()


def test_every_metric_of_the_table_has_its_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposition())}
    for metric in GATEWAY_METRICS:
        family = families.pop((PREFIX + metric.name).removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert {name for sample in family.samples for name in sample.labels} - {"le"} == set(metric.labels)
    assert not families


def test_counters_are_there_from_the_first_scrape() -> None:
    first = GatewayMetrics().exposition().decode()
    for series in ('refused_total{reason="busy"}', 'tokens_total{kind="prompt"}', "stream_errors_total"):
        assert f"pagemill_gateway_{series} 0.0\n" in first


def test_promtool_finds_nothing() -> None:
    checked = promtool("check", "metrics", stdin=exposition())
    assert checked.returncode == 0, checked.stderr + checked.stdout
