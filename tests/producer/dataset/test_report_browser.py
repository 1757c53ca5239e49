"""A run's HTML report in a browser: self-contained, drawn, and safe against markup in the data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.producer.dataset import report
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.dataset.label_columns import LabelColumns
from pagemill.producer.dataset.labels.cascade import Answers
from pagemill.producer.dataset.labels.stages import StageFigures
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.record import Totals
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.step import Step
from pagemill.producer.dataset.steps.walk import StepState
from pagemill.producer.dataset.summary import Summary
from tests.worker.browser import DESKTOP, PHONE, Browser, open_browser

pytestmark = pytest.mark.slow

HOSTILE = [
    "<img src=x onerror=document.title='owned'>",
    "<script>document.title='owned'</script>",
    "\"><svg onload=document.title='owned'>",
    "{{ 7 * 7 }} ' & \u202e right to left \U0001f4a5",
    "",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose labels, gold values, error codes and file names all contain markup."""
    summary = Summary(gold=HOSTILE[0], price_per_hour=2.0, totals=Totals(seconds=90.0), wants_schema=True)
    labels = LabelColumns("label")
    stages = [Step(model, Recipe(model), "label", labels=labels, below=0.8) for model in HOSTILE[:2]]
    summary.stages = StageFigures(Chain(tuple(stages)))
    for number, label in enumerate(HOSTILE * 4):
        kept: dict[str, Any] = {
            "outputs": [{"text": label, "parsed": label, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10 + number, "completion_tokens": 3, "cached_tokens": 8},
            "timing": {"queue_s": 0.1, "ttft_s": 0.2, "e2e_s": 0.1 * number},
        }
        kept["outputs"][0] |= {"label": label, "label_probs": {label: 1 - number / 40, "other": number / 40}}
        answer = StepState(stages[0], kept=kept)
        failure = StepState(stages[1], failure=Failure(HOSTILE[2], HOSTILE[0]))
        kept["answers"] = Answers((answer,) if answer.prob >= 0.8 else (answer, failure))
        summary.add_success(kept, label, HOSTILE[number % 2], is_merged=False)
    summary.add_failure(21, HOSTILE[1], HOSTILE[2])
    path = tmp_path_factory.mktemp("report") / "out.jsonl.report.html"
    report.write_html(summary, path, {"input": HOSTILE[1], "output": HOSTILE[0], "model": HOSTILE[2]})
    return path


def test_it_asks_for_nothing_from_elsewhere_and_runs_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe|object|embed|base|form)\b", text)
    assert not re.search(r"https?:|url\(|@import", text)
    assert not re.search(r"<[^>]*\son\w+=", text)


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Browser]:
    """With the report open; the tests that use it are skipped if there is no browser."""
    with open_browser() as browser:
        browser.view(DESKTOP)
        browser.open(page.as_uri())
        yield browser


def test_labels_are_shown_as_text(browser: Browser) -> None:
    assert browser.run("return document.title").startswith("Dataset run: ")
    cells = "return [...document.querySelectorAll('td, th')].map(cell => cell.textContent)"
    shown = browser.run(cells)
    assert {label for label in HOSTILE if label} <= set(shown)
    assert browser.run("return document.querySelectorAll('script, img').length") == 0
    assert browser.complaints() == []


def test_nothing_is_loaded_but_the_page(browser: Browser) -> None:
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


def test_every_bar_is_drawn_and_the_longest_fills_its_chart(browser: Browser) -> None:
    widths = browser.run(
        "return [...document.querySelectorAll('svg:not(.curve, .reliability)')].map(svg => "
        "[svg.querySelector('rect').getBoundingClientRect().width, svg.getBoundingClientRect().width])"
    )
    # five labels, one finish reason, one failure
    assert len(widths) == 7
    assert all(0 < bar <= chart + 1 for bar, chart in widths)
    assert all(abs(bar - chart) < 2 for bar, chart in widths), "all counts are equal within a chart"


def test_the_curve_of_a_cascade_is_drawn_inside_its_frame(browser: Browser) -> None:
    outside = browser.run(
        "const frame = document.querySelector('svg.curve').getBoundingClientRect();"
        "return [...document.querySelectorAll('svg.curve circle')].map(dot => dot.getBoundingClientRect())"
        ".map(dot => dot.left >= frame.left && dot.right <= frame.right && dot.top >= frame.top"
        " && dot.bottom <= frame.bottom && dot.width > 0)"
    )
    assert len(outside) > 50
    assert all(outside)


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_can_be_read(browser: Browser, size: tuple[int, int], dark: bool) -> None:
    browser.view(size, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    ink, paper = browser.run(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    assert abs(_lightness(ink) - _lightness(paper)) > 150
    browser.view(DESKTOP)


def _lightness(css: str) -> float:
    red, green, blue = (int(value) for value in re.findall(r"\d+", css)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue
