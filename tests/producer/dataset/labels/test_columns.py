"""A run with `label_probs`: its columns in every kind of output, read back, scaled, and compared with gold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow
import pytest
from pyarrow import parquet

from pagemill import Producer
from pagemill.producer.dataset import report
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.label_columns import scaled
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import open_source
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from tests.producer.dataset.labels.test_calibration import drawn
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker

DRAWN = drawn(400, 2.5)
"""The output of the scripted worker: overconfident, as the gold labels are drawn at temperature 2.5."""
ROWS = [{"text": str(number), "gold": gold} for number, (gold, _) in enumerate(DRAWN)]


def answering(queue: Queue, pulled: PulledJob) -> None:
    job = Job.from_payload(pulled.payload)
    assert job.label_probs == "product"
    probs = DRAWN[int(job.prompt or "0")][1]
    label = max(probs, key=probs.__getitem__)
    output = Output(index=0, text=label, finish_reason="stop", label=label, label_probs=probs, logprob=-1.0)
    result = Result(id=pulled.job_id, outputs=(output,), model="m").model_dump_json()
    queue.run(transitions.commit(queue.name, pulled.job_id, pulled.token, "succeeded", result))


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with (
        Producer(valkey_url, queue=queue_name) as producer,
        scripted_worker(valkey_url, queue_name, answering),
    ):
        yield producer


def pipeline(**options: Any) -> Pipeline:
    fields = {"label_probs": "product"} | options
    return Pipeline("{{ text }}", model="m", chat=False, choices=list("abcd"), **fields)  # type: ignore[arg-type]


def probabilities(line: dict[str, Any], name: str = "label") -> dict[str, float]:
    value = line[f"{name}_probs"]
    return json.loads(value) if isinstance(value, str) else value  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_the_columns_are_written_and_read_back(name: str, producer: Producer, tmp_path: Path) -> None:
    """Also at another temperature than before: no result is computed again or scaled twice."""
    out, rows = tmp_path / name, ROWS[:10]
    scales: list[Any] = [1.0, 2.0, 2.0, 1.0]
    for start, scale in enumerate(scales):
        summary = pipeline().run(rows, out=out, producer=producer, label_temperature=scale)
        assert (summary.succeeded, summary.adopted) == (10, 10 if start else 0)
        lines = [row.fields or {} for row in open_source(out).rows()]
        assert list(lines[0]) == ["text", "gold", "label", "label_prob", "label_probs", "_pagemill"]
        for line, (_, probs) in zip(lines, DRAWN, strict=False):
            wanted = scaled(probs, scale)
            assert line["label"] == max(probs, key=probs.__getitem__)
            assert float(line["label_prob"]) == pytest.approx(wanted[line["label"]])
            assert probabilities(line) == pytest.approx(wanted)
    if name == "out.parquet":
        schema = parquet.read_schema(out)
        assert schema.field("label_prob").type == pyarrow.float64()


@pytest.mark.parametrize(
    "make", [pandas.DataFrame, polars.DataFrame, lambda rows: pyarrow.Table.from_pylist(rows)]
)
def test_a_frame_has_them(make: Any, producer: Producer) -> None:
    frame = pipeline().run(make(ROWS[:3]), producer=producer, output_column="r").frame
    names = [
        str(name) for name in (frame.column_names if isinstance(frame, pyarrow.Table) else frame.columns)
    ]
    assert names == ["text", "gold", "r", "r_prob", "r_probs"]
    values = frame["r_prob"].to_pylist() if isinstance(frame, pyarrow.Table) else list(frame["r_prob"])
    assert values == pytest.approx([max(probs.values()) for _, probs in DRAWN[:3]])


def test_gold_values_give_a_calibration(producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    summary = pipeline().run(ROWS, out=out, producer=producer, gold="gold")
    facts = summary.as_json()
    right = sum(gold == max(probs, key=probs.__getitem__) for gold, probs in DRAWN)
    assert facts["accuracy"] == right / len(DRAWN)
    assert 0.0 < facts["macro_f1"] < 1.0
    calibration = facts["calibration"]
    assert calibration["temperature"] == 1.0
    assert calibration["fitted_temperature"] == pytest.approx(2.5, rel=0.25)
    assert calibration["expected_calibration_error"] > 2 * calibration["error_at_fitted_temperature"]
    assert sum(each["rows"] for each in calibration["bins"]) == len(DRAWN)
    lines = dict(report.figures(summary))
    assert "which fits best" in lines["calibration error"]
    assert "macro F1" in lines

    fitted = pipeline().run(ROWS, out=out, producer=producer, gold="gold", label_temperature="fit")
    assert (fitted.adopted, fitted.accuracy) == (len(DRAWN), summary.accuracy)
    after = fitted.as_json()["calibration"]
    assert after["temperature"] == after["fitted_temperature"] == calibration["fitted_temperature"]
    assert after["expected_calibration_error"] == pytest.approx(calibration["error_at_fitted_temperature"])
    first = next(open_source(out).rows()).fields or {}
    assert probabilities(first) == pytest.approx(scaled(DRAWN[0][1], after["temperature"]))
    page = tmp_path / "page.html"
    report.write_html(fitted, page, {"input": "i", "output": "o", "model": "m"})
    drawn_bars = page.read_text().partition('aria-label="reliability diagram"')[2].partition("</svg>")[0]
    assert drawn_bars.count("<rect ") == len(after["bins"])


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"label_temperature": "fit"}, "--gold"),
        ({}, {"label_temperature": 0.0}, "from 0.01 to 100"),
        ({}, {"label_temperature": float("nan")}, "from 0.01 to 100"),
        ({}, {"label_temperature": "warm"}, "from 0.01 to 100"),
        ({"label_probs": None}, {"label_temperature": 2.0}, "needs label_probs"),
        ({}, {"output_column": "text"}, "--output-column"),
    ],
)
def test_what_makes_no_sense_is_refused(
    producer: Producer, tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        pipeline(**fields).run(ROWS[:2], out=tmp_path / "out.jsonl", producer=producer, **options)


def test_a_gold_column_called_label_needs_another_name(producer: Producer, tmp_path: Path) -> None:
    rows = [{"text": "0", "label": "a"}]
    with pytest.raises(DatasetError, match="'label' already"):
        pipeline().run(rows, out=tmp_path / "out.jsonl", producer=producer, gold="label")
    summary = pipeline().run(
        rows, out=tmp_path / "out.jsonl", producer=producer, gold="label", output_column="made"
    )
    assert summary.compared == 1
