"""Two runs on one output: other work is rejected with its differences, the same work adds to one report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.dataset import report, run, stopwatch
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.record import Mean, Record
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.tables.rows import MemorySource
from pagemill.producer.dataset.work import TooManyErrors
from tests.producer.scripted_worker import scripted_worker

ROWS = [{"text": f"row {i}"} for i in range(20)]


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer, scripted_worker(valkey_url, queue_name):
        yield producer


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def simple(template: str = "{{ text }}", **options: Any) -> Pipeline:
    return Pipeline(template, model="m", chat=False, **options)


def outputs(out: Path) -> list[str]:
    return [json.loads(line)["output"] for line in out.read_text().splitlines()]


OTHERS = [
    (simple("{{ text }}!"), {}, r'template: "\{\{ text \}\}" then, "\{\{ text \}\}!" now'),
    (simple(max_tokens=5), {}, "max_tokens: none then, 5 now"),
    (simple(choices=["a"]), {}, 'structured_outputs: none then, {"choice": \\["a"\\]} now'),
    (Pipeline("{{ text }}", model="m2", chat=False), {}, 'model: "m" then, "m2" now'),
    (simple(), {"output_column": "label"}, 'output_column: "output" then, "label" now'),
    (simple(), {"limit": 5}, "is the output of 20 rows, and --limit 5 would drop"),
]


@pytest.mark.parametrize(("pipeline", "options", "says"), OTHERS, ids=[says[:8] for _, _, says in OTHERS])
def test_other_work_does_not_replace_a_finished_output(
    pipeline: Pipeline, options: Any, says: str, producer: Producer, out: Path
) -> None:
    simple().run(ROWS, out=out, producer=producer)
    before = out.read_bytes()
    with pytest.raises(DatasetError, match=says) as refused:
        pipeline.run(ROWS, out=out, producer=producer, **options)
    assert "--overwrite" in str(refused.value)
    assert out.read_bytes() == before
    assert {path.name for path in out.parent.iterdir()} == {"out.jsonl", "out.jsonl.run.json"}


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.csv.gz", "out.parquet"])
def test_an_output_without_rows_has_nothing_to_lose(name: str, producer: Producer, out: Path) -> None:
    rows = [{"text": "fail"}]
    assert simple().run(rows, out=out.with_name(name), producer=producer).failed == 1
    assert simple("a {{ text }}").run(rows, out=out.with_name(name), producer=producer).succeeded == 1


def test_overwrite_replaces_it(producer: Producer, out: Path) -> None:
    simple().run(ROWS, out=out, producer=producer)
    simple("{{ text }}!").run(ROWS, out=out, producer=producer, overwrite=True)
    assert outputs(out) == [f"row {i}!" for i in range(20)]
    with pytest.raises(DatasetError, match="template"):
        simple().run(ROWS, out=out, producer=producer)


def test_other_rows_do_not_replace_it_either(producer: Producer, out: Path) -> None:
    simple().run(ROWS, out=out, producer=producer)
    with pytest.raises(DatasetError, match="has none of these rows"):
        simple().run([{"text": "another file's"}], out=out, producer=producer)
    assert len(outputs(out)) == 20


def test_without_a_record_other_work_is_told_by_its_rows(producer: Producer, out: Path) -> None:
    """Like an output that an earlier version wrote."""
    simple().run(ROWS, out=out, producer=producer)
    out.with_name("out.jsonl.run.json").unlink()
    with pytest.raises(DatasetError, match="has none of these rows"):
        simple("{{ text }}!").run(ROWS, out=out, producer=producer)
    summary = simple().run(ROWS, out=out, producer=producer)
    assert (summary.adopted, summary.timed, summary.rows_per_second) == (20, 0, 0.0)


def interrupt(pipeline: Pipeline, producer: Producer, out: Path, rows: list[dict[str, str]]) -> None:
    with pytest.raises(TooManyErrors):
        pipeline.run([*rows, {"text": "fail"}], out=out, producer=producer, max_errors=0)


def test_an_interrupted_run_is_not_taken_up_by_other_work(producer: Producer, out: Path) -> None:
    interrupt(simple(), producer, out, ROWS)
    with pytest.raises(DatasetError, match=r"out\.jsonl\.partial is of a run with other settings .*template"):
        simple("{{ text }}!").run(ROWS, out=out, producer=producer)
    simple("{{ text }}!").run(ROWS, out=out, producer=producer, overwrite=True)
    assert outputs(out) == [f"row {i}!" for i in range(20)]


def test_overwrite_goes_on_with_its_own_work(producer: Producer, out: Path) -> None:
    """Repeating the command: with --overwrite it resumes instead of restarting each time."""
    interrupt(simple(), producer, out, ROWS)
    summary = simple().run(ROWS, out=out, producer=producer, overwrite=True)
    assert (summary.succeeded, summary.totals.starts) == (20, 2)


def test_when_and_where_a_job_runs_makes_no_other_work(producer: Producer, out: Path) -> None:
    simple().run(ROWS, out=out, producer=producer)
    summary = simple(priority="high", timeout=60.0).run(ROWS, out=out, producer=producer)
    assert summary.adopted == 20


def test_time_and_kv_figures_add_up_over_starts(producer: Producer, out: Path) -> None:
    def start(count: int, kv: float) -> Any:
        dataset = DatasetRun(MemorySource(ROWS[:count]), out, simple().recipe, price_per_hour=3600.0)
        dataset.kv = lambda: (Mean(2, 2 * kv), Mean(2, kv))
        return dataset.execute(producer)

    first, second, third = start(10, 0.2), start(20, 0.4), start(20, 0.4)
    assert 0 < first.seconds < second.seconds < third.seconds
    assert [summary.totals.starts for summary in (first, second, third)] == [1, 2, 3]
    assert (third.succeeded, third.adopted, third.timed) == (20, 20, 20)
    assert third.rows_per_second == pytest.approx(20 / third.seconds)
    assert third.cost == pytest.approx(third.seconds)
    assert third.kv_utilization == pytest.approx((0.2 + 0.4 + 0.4) / 3)
    assert third.kv_waste == pytest.approx((0.1 + 0.2 + 0.2) / 3)
    lines = dict(report.figures(third))
    assert lines["of these"] == "0 new, 20 from the earlier output"
    assert "in 3 starts" in lines["time"]


def test_time_until_an_interruption_counts(producer: Producer, out: Path) -> None:
    interrupt(simple(), producer, out, ROWS)
    summary = simple().run(ROWS, out=out, producer=producer)
    assert summary.totals.starts == 2
    record = Record.read(out.with_name("out.jsonl.run.json"))
    assert record is not None
    assert record.totals == summary.totals
    assert record.rows == 20


def test_time_until_a_kill_counts_too(producer: Producer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals are stored during the run: no final step is needed, which a killed run would never reach."""
    monkeypatch.setattr(stopwatch, "STORE_INTERVAL_S", 0.0)
    with monkeypatch.context() as killed:
        killed.setattr(run.Stopwatch, "__exit__", lambda self, *exception: None)
        interrupt(simple(), producer, out, ROWS)
    assert simple().run(ROWS, out=out, producer=producer).totals.starts == 2


@pytest.mark.parametrize("text", ["{torn", "[]", '{"version": 1}', '{"version": 99}'])
def test_a_broken_record_is_refused(text: str, producer: Producer, out: Path) -> None:
    simple().run(ROWS, out=out, producer=producer)
    out.with_name("out.jsonl.run.json").write_text(text)
    with pytest.raises(DatasetError, match="is not the record of a run"):
        simple().run(ROWS, out=out, producer=producer)
    simple().run(ROWS, out=out, producer=producer, overwrite=True)
