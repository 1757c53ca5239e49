"""Writes deploy/kubernetes/components/monitoring/prometheusrule.yaml, the alerts as the Prometheus operator reads them.

python deploy/prometheus_rule.py    after a change in monitoring/prometheus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_ROOT = Path(__file__).resolve().parents[1]
SOURCE = _ROOT / "monitoring" / "prometheus"
TARGET = _ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "prometheusrule.yaml"
_HEADER = "# Written by python deploy/prometheus_rule.py. Change monitoring/prometheus instead.\n"


def rule_groups() -> list[dict[str, Any]]:
    """Return the groups of the recording rules and of all alerts."""
    files = [SOURCE / "recording_rules.yml", *sorted((SOURCE / "alerts").glob("*.yml"))]
    return [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]


def render() -> str:
    """Return the object as YAML."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pagemill"},
        "spec": {"groups": rule_groups()},
    }
    return _HEADER + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    TARGET.write_text(render())
