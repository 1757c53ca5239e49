"""The gateway's exposition and its description in the catalogue: two tables, one truth."""

from __future__ import annotations

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from pagemill.monitoring.metrics.gateway import GATEWAY_METRICS
from pagemill.monitoring.metrics.metric import PREFIX
from pagemill.producer.gateway.metrics import GatewayMetrics
from tests.monitoring.prometheus_server import promtool

ANY = ()
"""What the descriptions are read from: they do not look at it."""


def exposition() -> str:
    """With every series that needs an event."""
    metrics = GatewayMetrics()
    metrics.finished("/v1/completions", "POST", 200, 0.3)
    metrics.first_token(0.1)
    return metrics.exposition().decode()


def labels_of(family: Family) -> set[str]:
    return {name for sample in family.samples for name in sample.labels} - {"le"}


def test_the_catalogue_says_what_the_gateway_exports() -> None:
    found = [
        (
            family.name + "_total" * (family.type == "counter"),
            family.type,
            family.documentation,
            labels_of(family),
        )
        for family in text_string_to_metric_families(exposition())
    ]
    described = [(PREFIX + m.name, m.kind, m.help, set(m.labels)) for m in GATEWAY_METRICS]
    assert sorted(found, key=lambda row: row[0]) == sorted(described, key=lambda row: row[0])


def test_the_catalogues_label_values_are_the_gateways() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposition())}
    for metric in GATEWAY_METRICS:
        described = [sample.labels for sample in metric.family(ANY).samples]
        if described:
            name = (PREFIX + metric.name).removesuffix("_total")
            assert described == [sample.labels for sample in families[name].samples]


def test_promtool_finds_nothing() -> None:
    checked = promtool("check", "metrics", stdin=exposition())
    assert checked.returncode == 0, checked.stderr + checked.stdout
