"""The rules as operators get them: valid, tested both ways, with existing metrics, and explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.monitoring.metrics.catalogue import CATALOGUE
from pagemill.monitoring.metrics.metric import PREFIX
from tests.monitoring.prometheus_server import (
    MONITORING,
    RULE_FILES,
    RULES,
    SERIES,
    Rule,
    alerts,
    panel_queries,
    promtool,
    recorded_names,
)
from tests.monitoring.snapshots import metrics

ALERTS = alerts()
RULE_TESTS = sorted((RULES / "tests").glob("*.yml"))
DOCS = tomllib.loads((MONITORING.parent / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
RUNBOOK = MONITORING.parent / "docs" / "runbook.md"


def exported_series() -> set[str]:
    """The names that a scrape can contain."""
    names = set()
    for metric in CATALOGUE:
        name = metric.prefix + metric.name
        names |= (
            {f"{name}_{part}" for part in ("bucket", "sum", "count")}
            if metric.kind == "histogram"
            else {name}
        )
    return names


def known(name: str) -> bool:
    return name in exported_series() | recorded_names() | {"up"} or name.startswith("DCGM_")


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    checked = promtool("check", "rules", *RULE_FILES)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    checked = promtool("check", "config", RULES / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_promtool_runs_the_tests(path: Path) -> None:
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize(
    ("labels", "base"),
    [({}, DOCS), ({"pagemill_docs": "https://docs.example/p/"}, "https://docs.example/p/")],
)
def test_a_runbook_link_is_absolute_and_its_base_a_setting(
    tmp_path: Path, labels: dict[str, str], base: str
) -> None:
    alert = {
        "eval_time": "6m",
        "alertname": "PagemillTargetDown",
        "exp_alerts": [
            {
                "exp_labels": {"severity": "warning", "job": "pagemill-gateways", "instance": "gone"},
                "exp_annotations": {
                    "summary": "gone does not answer Prometheus",
                    "description": "The target gone of pagemill-gateways has not been scraped for 5 minutes.",
                    "runbook_url": f"{base}runbook/#pagemilltargetdown",
                },
            }
        ],
    }
    case = {
        "interval": "1m",
        "external_labels": labels,
        "input_series": [{"series": 'up{job="pagemill-gateways",instance="gone"}', "values": "0x10"}],
        "alert_rule_test": [alert],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(file) for file in RULE_FILES], "tests": [case]}))
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_tested_firing_and_quiet() -> None:
    firing, quiet = set(), set()
    for path in RULE_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for check in case["promql_expr_test"]:
                if (match := re.search(r'alertname="(\w+)",alertstate="firing"', check["expr"])) is not None:
                    (firing if check["exp_samples"] else quiet).add(match.group(1))
    names = {alert.name for alert in ALERTS}
    assert firing == names
    assert quiet == names


@pytest.mark.slow
def test_the_tests_notice_when_an_alert_is_gone(tmp_path: Path) -> None:
    """Each rule in turn is changed so that it never fires; promtool must then fail."""
    path = RULES / "alerts" / "redis.yml"
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    (tmp_path / "tests").mkdir()
    (tmp_path / "recording_rules.yml").write_text(RULE_FILES[0].read_text())
    (tmp_path / "tests" / "test.yml").write_text((RULES / "tests" / "redis_test.yml").read_text())
    (tmp_path / "alerts").mkdir()
    for rule in document["groups"][0]["rules"]:
        expr, rule["expr"] = rule["expr"], "vector(1) < 0"
        (tmp_path / "alerts" / "redis.yml").write_text(yaml.safe_dump(document))
        assert promtool("test", "rules", tmp_path / "tests" / "test.yml").returncode != 0, rule["alert"]
        rule["expr"] = expr


def test_names_are_unique() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(names) == len(set(names)) >= 25


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_is_about_metrics_that_exist_and_says_what_to_do(alert: Rule) -> None:
    series = [name for name, _ in SERIES.findall(alert.expr)]
    assert series
    assert [name for name in series if not known(name)] == []
    assert alert.severity in ("critical", "warning", "info")
    assert set(alert.annotations) == {"summary", "description", "runbook_url"}
    link = alert.annotations["runbook_url"]
    base = "{{ with $externalLabels.pagemill_docs }}{{ . }}{{ else }}" + DOCS + "{{ end }}"
    assert link == f"{base}runbook/#{alert.name.lower()}"
    paragraph = re.search(
        rf"^#### {alert.name}\n\n(.+?)(?:\n\n#|\Z)", RUNBOOK.read_text(), re.DOTALL | re.MULTILINE
    )
    assert paragraph is not None, f"docs/runbook.md has no section on {alert.name}"
    assert len(paragraph.group(1).split()) >= 25, "what it means, how to see why, what to do"


def test_the_runbook_explains_no_alert_that_does_not_exist() -> None:
    explained = re.findall(r"^#### (Pagemill\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(alert.name for alert in ALERTS)


def test_recording_rules_are_about_metrics_that_exist_and_are_used() -> None:
    groups = yaml.safe_load(RULE_FILES[0].read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        assert [name for name, _ in SERIES.findall(rule["expr"]) if not known(name)] == []
        assert re.fullmatch(r"([a-z_]+:)?pagemill_[a-z0-9_]+:[a-z0-9_]+", rule["record"])
    for_people = {
        "instance:pagemill_generated_tokens:rate5m",
        "instance:pagemill_prompt_tokens:rate5m",
        "instance:pagemill_engine_busy:ratio_rate5m",
        "instance:pagemill_generated_tokens_per_busy_second:rate5m",
        "instance:pagemill_kv_cache_sharing:ratio",
        "instance:pagemill_prefix_cache_hit:ratio_rate5m",
    }
    queries = [rule["expr"] for rule in rules] + [alert.expr for alert in ALERTS]
    queries += [expr for _, expr in panel_queries()]
    used = {name for expr in queries for name, _ in SERIES.findall(expr)}
    assert {rule["record"] for rule in rules} - used - for_people == set()


def test_bucket_bounds_in_rules_are_bounds_of_those_histograms() -> None:
    """A limit without a bucket would silently find nothing."""
    stats = Engine.from_config(EngineConfig(model="echo")).stats()
    exposition = metrics(stats).render().decode()
    text = "".join(path.read_text() for path in RULE_FILES)
    selected = re.findall(r'(pagemill_\w+_bucket)\{le="([^"]+)"\}', text)
    assert len(selected) >= 4
    for name, bound in selected:
        assert f'{name}{{le="{bound}"}}' in exposition


def test_the_prefix_is_ours() -> None:
    assert all(name.startswith(PREFIX) for name in exported_series())
