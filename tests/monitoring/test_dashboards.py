"""The dashboards: up to date, complete, and with existing metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pagemill.monitoring.dashboards.__main__ import rendered, stale
from tests.monitoring.prometheus_server import (
    MONITORING,
    SERIES,
    boards,
    panel_queries,
    panels,
    promtool,
    substituted,
)
from tests.monitoring.test_prometheus_rules import known

BOARDS = boards()
QUERIES = panel_queries()
FROM_OTHERS = {"process_resident_memory_bytes", "ALERTS"}
QUEUES = re.compile(r"pagemill_(queue|redis_(?:memory|evicted|aof|connected|blocked))_\w+\{")


def test_the_committed_boards_are_what_the_code_says() -> None:
    assert stale() == [], "run python -m pagemill.monitoring.dashboards"
    assert len(rendered()) == len(BOARDS) == 7


@pytest.mark.parametrize("title", BOARDS)
def test_a_board_has_its_variables_and_its_panels_are_labeled(title: str) -> None:
    board = BOARDS[title]
    names = [variable["name"] for variable in board["templating"]["list"]]
    by_gateway = title == "Pagemill: gateway"
    assert names == (["datasource", "gateway"] if by_gateway else ["datasource", "queue", "model", "worker"])
    ids = [item["id"] for item in board["panels"]] + [panel["id"] for panel in panels(board)]
    rows = [item for item in board["panels"] if item["type"] == "row"]
    assert len(set(ids)) == len(rows) + len(list(panels(board)))
    for panel in panels(board):
        assert panel["title"]
        assert panel["description"].endswith("."), f"{panel['title']}: what does it show?"
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("title", BOARDS)
def test_panels_do_not_overlap(title: str) -> None:
    taken: dict[tuple[int, int], Any] = {}
    for panel in panels(BOARDS[title]):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_titles_and_ids_are_unique() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize(("place", "expr"), QUERIES, ids=[place for place, _ in QUERIES])
def test_a_query_is_about_metrics_that_exist(place: str, expr: str) -> None:
    series = {name for name, _ in SERIES.findall(expr)}
    assert series or any(name in expr for name in FROM_OTHERS)
    assert {name for name in series if not known(name)} == set()


@pytest.mark.parametrize(("place", "expr"), QUERIES, ids=[place for place, _ in QUERIES])
def test_what_several_processes_export_is_counted_once(place: str, expr: str) -> None:
    """Every worker of a queue exports its metrics: max before sum."""
    for match in QUEUES.finditer(expr):
        before = expr[: match.start()]
        assert re.search(r"max by \([\w, ]+\) \((?:rate\()?$", before), f"{match.group()} is not taken by max"


def test_promtool_can_parse_every_query() -> None:
    rules = [{"record": f"query_{i}", "expr": substituted(expr)} for i, (_, expr) in enumerate(QUERIES)]
    document = yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    path = "/dev/stdin"
    checked = promtool("check", "rules", path, stdin=document)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_provisioning_names_the_folder_and_the_source() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "pagemill.yml").read_text())["providers"]
    assert provider["type"] == "file"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
