"""docs/metrics.md matches the catalogue."""

from __future__ import annotations

import re

from pagemill.monitoring.metrics.catalogue import CATALOGUE
from pagemill.monitoring.metrics.reference_page import PAGE, page
from pagemill.monitoring.metrics.vllm_names import ALIASES


def lines() -> list[str]:
    """Return the lines of the page, with each list item on one line."""
    return page().replace("\n  ", " ").splitlines()


def test_the_committed_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run python -m pagemill.monitoring.metrics.reference_page"
    )


def test_every_metric_has_its_line() -> None:
    items = [line for line in lines() if line.startswith("- `")]
    assert len(items) == len(CATALOGUE)
    for metric in CATALOGUE:
        (line,) = [line for line in items if line.startswith(f"- `{metric.prefix}{metric.name}`")]
        assert ("*histogram*" in line) == (metric.kind == "histogram")
        assert metric.kind != "counter" or f"{metric.name}`".endswith("_total`")


def test_every_name_of_vllm_is_listed_with_its_type() -> None:
    rows = dict(re.findall(r"^- (gauge|counter|histogram): (.+)$", "\n".join(lines()), re.MULTILINE))
    for metric in ALIASES:
        assert f"`{metric.prefix}{metric.name}`" in rows[metric.kind]


def test_label_values_are_listed() -> None:
    (line,) = [line for line in lines() if line.startswith("- `pagemill_kv_cache_blocks`")]
    assert "`state` (free, cached, active, reserved)" in line
