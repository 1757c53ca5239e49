"""A real Prometheus for a single test, and its files under monitoring/."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, _free_port

MONITORING = ROOT / "monitoring"
RULES = MONITORING / "prometheus"
RULE_FILES = [RULES / "recording_rules.yml", *sorted((RULES / "alerts").glob("*.yml"))]
REQUIRED = "PAGEMILL_REQUIRE_PROMETHEUS"
"""Set where the tests must not be skipped: in CI."""

SERIES = re.compile(
    r"(?<![\w:.\"])((?:[a-z_]+:)?(?:pagemill_\w+|DCGM_\w+)(?::\w+)*|up)(\{[^{}]*\})?(?![\w:(\"])"
)
"""A metric's name and its matchers, as in Pagemill's queries."""


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test without it, or fails where it is required."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian's package prometheus)"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def promtool(*args: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *map(str, args)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert as defined in its file."""

    name: str
    expr: str
    severity: str
    annotations: dict[str, str]


def alerts() -> list[Rule]:
    return [
        Rule(rule["alert"], rule["expr"], rule["labels"]["severity"], rule["annotations"])
        for path in RULE_FILES[1:]
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def recorded_names() -> set[str]:
    groups = yaml.safe_load(RULE_FILES[0].read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"]}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A dashboard's panels, including those inside collapsed rows."""
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", ())


def boards() -> dict[str, dict[str, Any]]:
    """The committed dashboards by their title."""
    paths = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
    documents = [json.loads(path.read_text()) for path in paths]
    return {document["title"]: document for document in documents}


def panel_queries() -> list[tuple[str, str]]:
    """(dashboard / panel / query, expression) of every query on every dashboard."""
    return [
        (f"{title} / {panel['title']} / {target['refId']}", target["expr"])
        for title, board in boards().items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def substituted(expr: str, *, window: str = "1m", worker: str = ".+", queue: str = ".+") -> str:
    """The query as Grafana would send it, with all values selected."""
    values = {
        "$__rate_interval": window, "$worker": worker, "$queue": queue, "$model": ".+", "$gateway": ".+",
    }  # fmt: skip
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable is left in {expr}"
    return expr


@dataclass
class PrometheusServer:
    """Scrapes `targets` every second with our rules; `for:` is reduced to a second, the expressions are unchanged."""

    directory: Path
    targets: dict[str, list[str]]
    """Job name -> host:port."""
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        binary = program("prometheus")
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in RULE_FILES:
            document = yaml.safe_load(path.read_text())
            for group in document["groups"]:
                for rule in group["rules"]:
                    if "for" in rule:
                        rule["for"] = "1s"
            (self.directory / path.name).write_text(yaml.safe_dump(document))
        self.retarget(self.targets)
        self.port = _free_port()
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self.directory / path.name) for path in RULE_FILES],
            "scrape_configs": [
                {
                    "job_name": job,
                    "file_sd_configs": [
                        {"files": [f"{self.directory}/{job}.json"], "refresh_interval": "1s"}
                    ],
                }
                for job in self.targets
            ],
        }
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (self.directory / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={self.directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_ready()

    def retarget(self, targets: dict[str, list[str]]) -> None:
        """Scrape these from now on; picked up within a second."""
        self.targets = targets
        for job, addresses in targets.items():
            path = self.directory / f"{job}.json"
            path.with_suffix(".new").write_text(json.dumps([{"targets": addresses}]))
            path.with_suffix(".new").replace(path)

    def stop(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGTERM)
            self.process.wait(timeout=30)
            self.process = None

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of an expression. Raises if Prometheus rejects it."""
        reply = self._get("/api/v1/query", query=expr)
        assert reply["status"] == "success", reply
        result: list[dict[str, Any]] = reply["data"]["result"]
        return result

    def numbers(self, expr: str) -> list[float]:
        """The values of an expression, without those that are NaN."""
        values = [float(series["value"][1]) for series in self.query(expr)]
        return [value for value in values if value == value]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.alerts() if alert["state"] == "firing"}

    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/api/v1/alerts")["data"]["alerts"]
        return found

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            document: dict[str, Any] = json.load(response)
        return document

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + 120
        while time.monotonic() < give_up:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"prometheus did not start:\n{(self.directory / 'prometheus.log').read_text()}")
