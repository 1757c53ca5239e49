"""`pagemill top`'s drawing, from plain values."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from pagemill.monitoring.live.feed import OtherWorker
from pagemill.monitoring.live.top import TopView, cells, screen, sparkline, unpack
from pagemill.monitoring.queue_figures import QueueFigures


def live(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "worker": {"id": "w1", "state": "ready", "redis_up": True, "blocked": None, "uptime_s": 61.0},
        "engine": {"model": "tiny", "device": "cpu", "tier": "token", "running": 2, "waiting": 1,
                   "max_num_seqs": 8, "preemptions": 3},
        "kv": {"utilization": 0.5, "active": 50, "capacity": 100, "peak": 0.7, "prefix_hit_tokens": 30,
               "prefix_queried_tokens": 40},
        "history": {"active": [0.1, 0.5], "generated": [0.0, 12.0], "computed": [5.0, 20.0], "running": [1, 2],
                    "queued": [None, 7]},
        "jobs": {"total": 3, "shown": [
            {"id": "job-1", "phase": "decode", "prompt_tokens_done": 5, "prompt_tokens": 5, "generated_tokens": 4,
             "max_tokens": 16, "age_s": 1.5, "attempt": 2, "crashes": 1}]},
        "ends": [{"id": "job-0", "outcome": "failed", "tokens": 0, "took_s": 0.1, "ago_s": 3.0,
                  "code": "invalid_job", "message": "[bold]not markup[/bold]"}],
        "blocks": {"runs": "r3s46a20c30f"},
    }  # fmt: skip
    return document | changes


def drawn(view: TopView, width: int = 110, height: int = 40, *, colors: bool = True) -> str:
    console = Console(
        width=width, height=height, record=True, file=None, force_terminal=False, color_system=None
    )
    with console.capture() as capture:
        console.print(screen(view, width, height, colors=colors))
    return capture.get()


QUEUE = QueueFigures(
    queue="q",
    taken_at=0.0,
    waiting={("tiny", "high"): 1200},
    oldest_age_seconds={("tiny", "high"): 42.0},
    running=2,
    dead=1,
    paused=True,
)
WORKERS = [
    OtherWorker("w1", "ready", ("tiny",), 2, "http://h:9790"),
    OtherWorker("w2", "loading", (), 0, None),
]


def test_everything_is_on_the_screen() -> None:
    text = drawn(TopView(QUEUE, WORKERS, live()))
    parts = (
        *("tiny", "1,200 waiting", "oldest 42.0 s", "1 dead", "paused", "50 of 100", "peak 70%"),
        *("prefix hits 75%", "of 8", "active 46", "shared 3", "job-1", "4/16", "2 +1", "job-0", "failed"),
        *("> w1", "loading"),
    )
    for part in parts:
        assert part in text, part
    assert "[bold]not markup[/bold]" in text, "a message is text"


def test_blocks_are_letters_where_there_are_no_colors() -> None:
    assert "rsss" + "a" * 46 in drawn(TopView(live=live()), colors=False)


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 60)])
def test_it_fits_any_terminal(size: tuple[int, int]) -> None:
    lines = drawn(TopView(QUEUE, WORKERS, live()), *size).splitlines()
    assert max(map(len, lines)) <= size[0]


def test_without_a_worker_the_queue_and_the_reason_are_left() -> None:
    text = drawn(TopView(QUEUE, (), None, ("http://h:9790: refused",)))
    assert "1,200 waiting" in text
    assert "no worker is alive" in text
    assert "refused" in text


def test_a_worker_that_loads_has_no_figures_yet() -> None:
    document = live(engine=None, kv=None, blocks=None, jobs={"total": 0, "shown": []}, ends=[])
    assert "w1" in drawn(TopView(live=document))
    assert "in a moment" in drawn(TopView(live=live(blocks=None)))


def test_a_large_pool_is_grouped_by_its_busiest_blocks() -> None:
    rows = cells("f" * 999 + "s", columns=10, rows=5)
    assert (len(rows), {len(row) for row in rows}) == (5, {10})
    assert "".join(rows) == "f" * 49 + "s"
    assert cells("racf", 10, 5) == ["racf"]


def test_run_lengths_and_sparklines() -> None:
    assert unpack("3f2asr") == "fffaasr"
    assert sparkline([None, 0.0, 0.5, 1.0], 10, 1.0) == " ▁▅█"
    assert sparkline([1, 2, 3], 2) == "▆█"
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "▁▁"
