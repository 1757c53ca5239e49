"""Cascades on a real server: columns, resuming, failures, temperatures, margins, the report, SIGKILL."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
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
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.label_columns import scaled
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import open_source
from pagemill.producer.dataset.work import Tally, TooManyErrors
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.keys import lane_model
from pagemill.producer.wire.schema.outputs import Output, Result, Timing, Usage
from tests.producer.dataset.killing import killed_until_done
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker

LABELS = "abc"
RUN = """
import sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out = sys.argv[1:]
with Producer(url, queue=queue) as producer:
    pipeline = Pipeline("{{ text }}", model="small", chat=False, choices=list("abc"), label_probs="product")
    pipeline.run(source, out=out, producer=producer, gold="gold", escalate_below=0.8, to=["big", "huge"], window=150)
"""


def says(model: str, text: str) -> dict[str, float]:
    """The probabilities that a model returns: a better model is more confident, and correct more often."""
    draw = random.Random(f"{model} {text}")
    skill = {"small": 1.0, "big": 2.0, "huge": 3.0}[model]
    weights = {label: 2.718 ** (draw.gauss(0, 1) + skill * (label == gold(text))) for label in LABELS}
    return {label: weight / sum(weights.values()) for label, weight in weights.items()}


def gold(text: str) -> str:
    return random.Random(text).choice(LABELS)


def best(probs: dict[str, float]) -> tuple[str, float]:
    return max(probs.items(), key=lambda pair: pair[1])


class Workers:
    """Answers jobs of the three models; counts how often each ran, and fails the configured ones."""

    def __init__(self) -> None:
        self.ran: Counter[tuple[str, str]] = Counter()
        self.order: list[str] = []
        self.adapters: Counter[tuple[str, str | None]] = Counter()
        self.failing: set[str] = set()
        self.delay_s = 0.0

    def __call__(self, queue: Queue, pulled: PulledJob) -> None:
        job = Job.from_payload(pulled.payload)
        text = job.prompt or ""
        self.ran[job.model, text] += 1
        self.order.append(job.model)
        self.adapters[job.model, job.adapter] += 1
        time.sleep(self.delay_s)
        if job.model in self.failing:
            queue.fail(pulled, "dead" if text.endswith("7") else "failed")
            return
        probs = says(job.model, text)
        output = Output(
            index=0, text=best(probs)[0], finish_reason="stop", label=best(probs)[0], label_probs=probs
        )
        result = Result(
            id=pulled.job_id, outputs=(output,), model=job.model, timing=Timing(queue_s=0.5, e2e_s=1.5),
            usage=Usage(prompt_tokens=10, completion_tokens=1),
        )  # fmt: skip
        queue.run(
            transitions.commit(queue.name, pulled.job_id, pulled.token, "succeeded", result.model_dump_json())
        )


@pytest.fixture
def workers(valkey_url: str, queue_name: str) -> Iterator[Workers]:
    workers = Workers()
    lanes = ("small", "big", "huge", lane_model("small", "lora"))
    with scripted_worker(valkey_url, queue_name, workers, lanes):
        yield workers


@pytest.fixture
def producer(valkey_url: str, queue_name: str, workers: Workers) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer:
        yield producer


def rows(count: int) -> list[dict[str, str]]:
    return [{"text": str(number), "gold": gold(str(number))} for number in range(count)]


def pipeline(**options: Any) -> Pipeline:
    fields = {"label_probs": "product", "choices": list(LABELS)} | options
    return Pipeline("{{ text }}", model="small", chat=False, **fields)


def read(out: Path) -> list[dict[str, Any]]:
    lines = [row.fields or {} for row in open_source(out).rows()]
    for line in lines:
        for name in ("label_probs", "label_answers"):
            line[name] = json.loads(line[name]) if isinstance(line[name], str) else line[name]
    return lines


def expected(
    text: str, below: float, models: list[str], scale: float = 1.0
) -> list[tuple[str, dict[str, float]]]:
    """The path of a row by the definition: every model that is called, and its result."""
    taken = []
    for model in models:
        taken.append((model, says(model, text)))
        if best(scaled(taken[-1][1], scale))[1] >= below:
            break
    return taken


def check(out: Path, count: int, below: float, models: list[str], scale: float = 1.0) -> None:
    lines = read(out)
    assert [line["text"] for line in lines] == [row["text"] for row in rows(count)]
    for line in lines:
        taken = expected(line["text"], below, models, scale)
        model, probs = taken[-1]
        assert (line["label"], line["label_model"], int(line["label_stage"])) == (
            best(probs)[0],
            model,
            len(taken),
        )
        assert line["label_probs"] == pytest.approx(scaled(probs, scale))
        assert float(line["label_prob"]) == pytest.approx(best(scaled(probs, scale))[1])
        told = line["label_answers"][: len(taken)]
        assert [(each["model"], each["probs"]) for each in told] == taken
        assert [each["prob"] for each in told] == pytest.approx([best(scaled(p, scale))[1] for _, p in taken])


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_rows_go_on_and_a_finished_output_is_taken_up_at_any_margin(
    name: str, producer: Producer, workers: Workers, tmp_path: Path
) -> None:
    """A higher margin calls further models; a lower one calls none, and keeps all results."""
    out = tmp_path / name
    most = 0
    for below in (0.8, 0.6, 0.9, 0.8) if name == "out.jsonl" else (0.8, 0.9):
        summary = pipeline().run(
            rows(60), out=out, producer=producer, gold="gold", escalate_below=below, to=["big", "huge"]
        )
        check(out, 60, below, ["small", "big", "huge"])
        assert set(workers.ran.values()) == {1}, "something was paid for twice"
        right = sum(
            best(expected(row["text"], below, ["small", "big", "huge"])[-1][1])[0] == row["gold"]
            for row in rows(60)
        )
        assert summary.accuracy == right / 60
        if below in (0.6, 0.8) and most:
            assert len(workers.ran) == most
        most = max(most, len(workers.ran))
    if name == "out.parquet":
        schema = parquet.read_schema(out)
        assert (schema.field("label_stage").type, schema.field("label_model").type) == (
            pyarrow.int64(),
            pyarrow.string(),
        )


def test_it_can_be_added_to_a_run_of_one_model_but_not_taken_away(
    producer: Producer, workers: Workers, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    pipeline().run(rows(30), out=out, producer=producer)
    assert {model for model, _ in workers.ran} == {"small"}
    pipeline().run(rows(30), out=out, producer=producer, escalate_below=0.8, to="big")
    check(out, 30, 0.8, ["small", "big"])
    pipeline().run(rows(30), out=out, producer=producer, escalate_below=0.8, to=["big", "huge"])
    check(out, 30, 0.8, ["small", "big", "huge"])
    assert set(workers.ran.values()) == {1}
    before = out.read_bytes()
    for options in ({}, {"escalate_below": 0.8, "to": "huge"}):
        with pytest.raises(DatasetError, match=r'to: \["big", "huge"\] then'):
            pipeline().run(rows(30), out=out, producer=producer, **options)
    assert out.read_bytes() == before


def test_the_margin_is_held_against_scaled_probabilities(
    producer: Producer, workers: Workers, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    for scale in (2.0, 1.0, 0.5):
        pipeline().run(
            rows(40), out=out, producer=producer, escalate_below=0.8, to=["big"], label_temperature=scale
        )
        check(out, 40, 0.8, ["small", "big"], scale)
    assert set(workers.ran.values()) == {1}
    summary = pipeline().run(
        rows(40), out=out, producer=producer, gold="gold", escalate_below=0.8, to=["big"], label_temperature=(0.5, 2.0)
    )  # fmt: skip
    for line in read(out):
        scale = (0.5, 2.0)[line["label_stage"] - 1]
        assert line["label_probs"] == pytest.approx(scaled(says(line["label_model"], line["text"]), scale))
        assert line["_pagemill"]["label_temperature"] == scale
    stages = summary.as_json()["cascade"]["stages"]
    assert [stage["calibration"]["temperature"] for stage in stages] == [0.5, 2.0]
    assert all(stage["calibration"]["fitted_temperature"] for stage in stages)


def test_equal_rows_run_once_at_every_stage(producer: Producer, workers: Workers, tmp_path: Path) -> None:
    repeated = rows(10) * 3
    summary = pipeline().run(
        repeated, out=tmp_path / "out.jsonl", producer=producer, gold="gold", escalate_below=1.0, to="big"
    )
    assert workers.ran == {(model, row["text"]): 1 for model in ("small", "big") for row in rows(10)}
    stages = summary.as_json()["cascade"]["stages"]
    assert [(stage["rows"], stage["jobs"], stage["prompt_tokens"]) for stage in stages] == [(30, 10, 100)] * 2
    assert summary.prompt_tokens == 200
    assert stages[0]["seconds"] == pytest.approx(10.0)


@pytest.mark.slow
def test_later_models_have_work_before_the_first_is_done(
    producer: Producer, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the window is always full."""
    monkeypatch.setattr("pagemill.producer.dataset.work.CHUNK", 10)
    summary = pipeline().run(
        rows(200),
        out=tmp_path / "out.jsonl",
        producer=producer,
        escalate_below=1.0,
        to=["big", "huge"],
        window=20,
    )
    assert summary.succeeded == 200
    assert workers.order.index("big") < 60
    assert workers.order.index("huge") < 120
    assert Counter(workers.order[:300])["huge"] > 0


def test_a_failed_stage_leaves_the_first_answer_and_is_tried_again(
    producer: Producer, workers: Workers, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    workers.failing = {"big"}
    options: dict[str, Any] = {"gold": "gold", "escalate_below": 0.8, "to": ["big", "huge"]}
    summary = pipeline().run(rows(30), out=out, producer=producer, **options)
    passed = [row["text"] for row in rows(30) if len(expected(row["text"], 0.8, ["small", "big"])) > 1]
    assert (summary.succeeded, summary.failed) == (30, 0)
    assert summary.stages is not None
    assert summary.stages.failed == len(passed) > 0
    for line in read(out):
        assert (line["label_model"], line["label"]) == ("small", best(says("small", line["text"]))[0])
        if line["text"] in passed:
            assert line["label_answers"][1] == {"model": "big", "error": "invalid_job: no good"}
    facts = summary.as_json()["cascade"]
    assert facts["stages"][1]["failed"] == {"invalid_job": len(passed)}
    assert ("stage 2: failed: invalid_job", str(len(passed))) in report.figures(summary)
    used = next(point for point in facts["curve"] if point["below"] == 0.8)
    assert (used["accuracy"], used["covered"]) == (pytest.approx(summary.accuracy), 1.0)
    workers.failing = set()
    pipeline().run(rows(30), out=out, producer=producer, **options)
    check(out, 30, 0.8, ["small", "big", "huge"])
    assert all(count == 1 for (model, _), count in workers.ran.items() if model != "big")
    workers.failing = {"big"}
    with pytest.raises(TooManyErrors):
        pipeline().run(rows(30), out=tmp_path / "other.jsonl", producer=producer, max_errors=2, **options)


def test_a_failed_first_stage_is_a_failed_row(producer: Producer, workers: Workers, tmp_path: Path) -> None:
    workers.failing = {"small"}
    out = tmp_path / "out.jsonl"
    summary = pipeline().run(rows(5), out=out, producer=producer, escalate_below=0.8, to="big")
    assert (summary.succeeded, summary.failed) == (0, 5)
    assert {model for model, _ in workers.ran} == {"small"}


def test_an_adapter_is_of_the_first_model_alone(producer: Producer, workers: Workers, tmp_path: Path) -> None:
    pipeline(adapter="lora").run(
        rows(5), out=tmp_path / "out.jsonl", producer=producer, escalate_below=1.0, to="big"
    )
    assert workers.adapters == {("small", "lora"): 5, ("big", None): 5}


@pytest.mark.parametrize(
    "make", [pandas.DataFrame, polars.DataFrame, lambda rows: pyarrow.Table.from_pylist(rows)]
)
def test_a_frame_has_the_stages(make: Any, producer: Producer) -> None:
    frame = pipeline().run(make(rows(12)), producer=producer, escalate_below=0.8, to="big").frame
    is_arrow = isinstance(frame, pyarrow.Table)
    names = [str(name) for name in (frame.column_names if is_arrow else frame.columns)]
    added = ["label", "label_prob", "label_probs", "label_stage", "label_model", "label_answers"]
    assert names == ["text", "gold", *added]
    models = frame["label_model"].to_pylist() if is_arrow else list(frame["label_model"])
    assert models == [expected(str(number), 0.8, ["small", "big"])[-1][0] for number in range(12)]


@pytest.mark.slow
def test_the_report_tells_stages_and_curve(producer: Producer, tmp_path: Path) -> None:
    news: list[dict[str, int]] = []

    def tell(tally: Tally) -> None:
        news.append({model: stage.succeeded for model, stage in tally.stages.items()})

    summary = pipeline().run(
        rows(200), out=tmp_path / "out.jsonl", producer=producer, gold="gold", escalate_below=0.7, to=["big"],
        on_progress=tell,
    )  # fmt: skip
    facts = summary.as_json()["cascade"]
    passed = [row for row in rows(200) if best(says("small", row["text"]))[1] < 0.7]
    small, big = facts["stages"]
    assert (small["rows"], big["rows"], big["final"]) == (200, len(passed), len(passed))
    assert big["share"] == len(passed) / 200
    assert big["accuracy"] == sum(best(says("big", r["text"]))[0] == r["gold"] for r in passed) / len(passed)
    assert small["accuracy_passed_on"] == sum(
        best(says("small", r["text"]))[0] == r["gold"] for r in passed
    ) / len(passed)
    assert news[-1] == {"big": len(passed)}
    none, *_, everything = facts["curve"]
    assert (none["below"], none["share"], none["tokens"]) == (0.0, 0.0, 11.0)
    assert none["accuracy"] == small["accuracy"]
    assert everything["share"] == 1.0
    assert everything["covered"] == big["share"]
    assert everything["accuracy"] == big["accuracy"]
    page = tmp_path / "page.html"
    report.write_html(summary, page, {"input": "i", "output": "o", "model": "m"})
    drawn = (
        page.read_text().partition('aria-label="accuracy against tokens per row"')[2].partition("</svg>")[0]
    )
    assert drawn.count("<circle ") == sum(point["accuracy"] is not None for point in facts["curve"])
    assert page.read_text().count('aria-label="reliability diagram"') == 2
    assert any("(this run)" in cells[0] for cells in report.curve_rows(summary))


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"label_probs": None}, {}, "add --choices a,b,c and --label-probs product"),
        ({"label_probs": None, "choices": None}, {}, "add --choices a,b,c and --label-probs product"),
        ({}, {"to": ()}, "--escalate-below needs --to MODEL"),
        ({}, {"escalate_below": None}, "--to needs --escalate-below, such as 0.8"),
        ({}, {"escalate_below": 0.0}, "above 0 and at most 1"),
        ({}, {"escalate_below": float("nan")}, "above 0 and at most 1"),
        ({}, {"to": ["big", "small"]}, "small is a stage twice"),
        ({}, {"to": "no model!"}, "a served model's name is"),
        ({}, {"to": [f"m{i}" for i in range(8)]}, "at most 8 stages"),
        ({}, {"label_temperature": "fit", "gold": "gold"}, "Fit it on rows with gold values first"),
        ({}, {"label_temperature": (1.0, 2.0, 3.0)}, "3 label temperatures for 2 models"),
        ({}, {"label_temperature": (1.0, 0.0)}, "from 0.01 to 100"),
    ],
)
def test_what_makes_no_sense_is_refused(
    producer: Producer, tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given = {"escalate_below": 0.8, "to": ["big"]} | options
    with pytest.raises(DatasetError, match=message):
        pipeline(**fields).run(rows(2), out=tmp_path / "out.jsonl", producer=producer, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_in_the_middle_of_escalations_it_pays_for_nothing_twice(
    workers: Workers, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(300)))
    command = [sys.executable, "-c", RUN, valkey_url, queue_name, str(source), str(out)]
    workers.delay_s = 0.001
    kills = killed_until_done(
        command, out.exists,
        lambda: sum(count for (model, _), count in workers.ran.copy().items() if model != "small"),
        chance=random.Random(3), steps=range(1, 80), max_kills=4,
    )  # fmt: skip
    assert kills >= 3
    assert set(workers.ran.values()) == {1}, "something was paid for twice"
    check(out, 300, 0.8, ["small", "big", "huge"])


@pytest.mark.parametrize(("total", "rows_done"), [(None, "5 rows"), (10, "5 of 10 rows")])
def test_the_progress_tells_each_later_stage(
    total: int | None, rows_done: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are those of the first stage; without a total if the input has not been read to its end."""
    monkeypatch.setattr("pagemill.producer.dataset.bar.LOG_INTERVAL_S", 0.0)
    stages = {"big": Tally(submitted=4, succeeded=2, failed=1), "huge": Tally()}
    with RunBar(total) as bar:
        bar.update(Tally(submitted=6, succeeded=4, failed=1, in_flight=2, stages=stages))
    said = capsys.readouterr().err
    assert said.startswith(rows_done)
    assert said.endswith("2 in flight  big: 3 of 4  huge: 0 of 0  2 errors\n")
