"""Recipes on a real server: columns, conditions, failures, resuming, frames, SIGKILL."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest

from pagemill import Producer
from pagemill.producer.dataset import report
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import RecipePipeline
from pagemill.producer.dataset.tables.rows import open_source
from pagemill.producer.dataset.work import Tally, TooManyErrors
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.envelope import rendered
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result, Timing, Usage
from pagemill.producer.wire.schema.signing import split_payload
from tests.producer.dataset.killing import killed_until_done
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker

RECIPE: dict[str, Any] = {
    "model": "m",
    "defaults": {"chat": False},
    "steps": [
        {
            "name": "label", "prompt": "{{ text }} is", "choices": ["good", "bad"],
            "label_probs": "product", "gold": "gold",
        },
        {
            "name": "why", "prompt": "{{ text }} is {{ label.text }} ({{ label.label_prob }}): why?",
            "when": {"label": "good"}, "column": "reason",
        },
        {"name": "title", "prompt": "In a word, {{why.text}}", "max_tokens": 4},
    ],
}  # fmt: skip
RUN = """
import json, sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import RecipePipeline
url, queue, recipe, source, out = sys.argv[1:]
with Producer(url, queue=queue) as producer:
    RecipePipeline(recipe).run(source, out=out, producer=producer, window=60)
"""


def is_good(text: str) -> bool:
    return random.Random(text).random() < 0.5


def prob(text: str) -> float:
    return 0.5 + random.Random(f"p{text}").random() / 2


class Model:
    """Answers the steps' jobs; counts how often each prompt ran, and fails those that contain `failing`."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.jobs: list[Job] = []
        self.failing: str | None = None
        self.how = "failed"
        self.delay_s = 0.0

    def __call__(self, queue: Queue, pulled: PulledJob) -> None:
        job = Job.from_payload(pulled.payload)
        if job.after is not None:
            job = rendered(job, split_payload(pulled.payload).outputs)
        prompt = job.prompt or "|".join(message.text for message in job.messages or ())
        self.ran[prompt] += 1
        self.jobs.append(job)
        time.sleep(self.delay_s)
        if self.failing is not None and self.failing in prompt:
            queue.fail(pulled, self.how)
            return
        if job.label_probs is not None:
            text = prompt.removesuffix(" is")
            labels = ["good", "bad"] if is_good(text) else ["bad", "good"]
            probs = {labels[0]: prob(text), labels[1]: 1 - prob(text)}
            output = Output(index=0, text=labels[0], finish_reason="stop", label=labels[0], label_probs=probs)
        else:
            output = Output(index=0, text=f"<{prompt}>", finish_reason="stop")
        result = Result(
            id=pulled.job_id, outputs=(output,), model=job.model, timing=Timing(queue_s=0.5, e2e_s=1.5),
            usage=Usage(prompt_tokens=10, completion_tokens=2),
        )  # fmt: skip
        queue.run(
            transitions.commit(queue.name, pulled.job_id, pulled.token, "succeeded", result.model_dump_json())
        )


@pytest.fixture
def model(valkey_url: str, queue_name: str) -> Iterator[Model]:
    model = Model()
    with scripted_worker(valkey_url, queue_name, model, ("m", "big")):
        yield model


@pytest.fixture
def producer(valkey_url: str, queue_name: str, model: Model) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer:
        yield producer


def rows(count: int) -> list[dict[str, Any]]:
    return [{"text": f"r{n}", "gold": "good" if is_good(f"r{n}") else "bad"} for n in range(count)]


def reason(text: str) -> str | None:
    return f"<{text} is good ({prob(text)!r}): why?>" if is_good(text) else None


def title(text: str) -> str | None:
    return f"<In a word, {reason(text)}>" if is_good(text) else None


def read(out: Path) -> list[dict[str, Any]]:
    return [row.fields or {} for row in open_source(out).rows()]


def check(out: Path, count: int) -> None:
    lines = read(out)
    assert [line["text"] for line in lines] == [row["text"] for row in rows(count)]
    for line in lines:
        text = line["text"]
        assert line["label"] == ("good" if is_good(text) else "bad")
        assert float(line["label_prob"]) == prob(text)
        assert (line["reason"] or None, line["title"] or None) == (reason(text), title(text))


def changed(number: int, **fields: Any) -> dict[str, Any]:
    """The recipe with another step of this number."""
    steps = [dict(step) for step in RECIPE["steps"]]
    steps[number] |= fields
    return RECIPE | {"steps": steps}


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_columns_of_all_steps_and_a_finished_output_is_taken_up(
    name: str, producer: Producer, model: Model, tmp_path: Path
) -> None:
    out = tmp_path / name
    news: list[dict[str, int]] = []

    def tell(tally: Tally) -> None:
        news.append({name: stage.succeeded for name, stage in tally.stages.items()})

    summary = RecipePipeline(RECIPE).run(rows(30), out=out, producer=producer, on_progress=tell)
    check(out, 30)
    good = sum(is_good(f"r{n}") for n in range(30))
    assert 0 < good < 30
    assert len(model.ran) == 30 + 2 * good
    assert news[-1] == {"why": good, "title": good}
    assert (summary.rows, summary.succeeded, summary.failed, summary.failed_steps) == (30, 30, 0, 0)
    label, why, last = summary.as_json()["steps"]
    assert (label["rows"], label["accuracy"], label["prompt_tokens"]) == (30, 1.0, 300)
    assert (why["rows"], why["skipped"]) == (good, {"condition_false": 30 - good})
    assert (last["rows"], last["skipped"]) == (good, {"condition_false": 30 - good})
    assert summary.completion_tokens == 2 * (30 + 2 * good)
    figures = dict(report.figures(summary))
    assert figures["step why"].startswith(f"{good} rows; {30 - good} skipped")
    report.write_html(summary, tmp_path / "page.html", {"input": "i", "output": "o", "model": "m"})
    more = RecipePipeline(RECIPE).run(rows(33), out=out, producer=producer)
    assert more.adopted >= 30
    check(out, 33)
    assert set(model.ran.values()) == {1}, "something was computed twice"


def test_a_step_may_be_added_but_not_changed_or_taken_away(
    producer: Producer, model: Model, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    RecipePipeline(RECIPE | {"steps": RECIPE["steps"][:2]}).run(rows(20), out=out, producer=producer)
    RecipePipeline(RECIPE).run(rows(20), out=out, producer=producer)
    check(out, 20)
    assert set(model.ran.values()) == {1}
    before = out.read_bytes()
    for recipe, says in (
        (RECIPE | {"steps": RECIPE["steps"][:2]}, "has a step title, which the recipe lacks"),
        (changed(1, prompt="{{ text }} {{ label.text }}?"), "whose step why was another .template: "),
    ):
        with pytest.raises(DatasetError, match=says):
            RecipePipeline(recipe).run(rows(20), out=out, producer=producer)
    assert out.read_bytes() == before


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_step_may_be_added_before_the_first(
    is_finished: bool, producer: Producer, model: Model, tmp_path: Path
) -> None:
    """Neither a finished output nor a journal is computed again."""
    out = tmp_path / "out.jsonl"

    def stop(tally: Tally) -> None:
        if tally.succeeded > 5 and not is_finished:
            raise InterruptedError

    with nullcontext() if is_finished else pytest.raises(InterruptedError):
        RecipePipeline(RECIPE).run(rows(20), out=out, producer=producer, on_progress=stop)
    tone = {"name": "tone", "prompt": "The tone of {{ text }}", "column": "tone"}
    RecipePipeline(RECIPE | {"steps": [tone, *RECIPE["steps"]]}).run(rows(20), out=out, producer=producer)
    check(out, 20)
    assert {line["tone"] for line in read(out)} == {f"<The tone of r{n}>" for n in range(20)}
    assert set(model.ran.values()) == {1}


@pytest.mark.parametrize("how", ["failed", "dead"])
def test_a_failed_step_fails_the_later_ones_and_is_tried_again(
    how: str, producer: Producer, model: Model, tmp_path: Path
) -> None:
    """The label is kept, none of it is computed again, and the error of the later step names the first."""
    out = tmp_path / "out.jsonl"
    model.failing, model.how = "why?", how
    summary = RecipePipeline(RECIPE).run(rows(12), out=out, producer=producer, max_errors=12)
    good = [row["text"] for row in rows(12) if is_good(row["text"])]
    assert (summary.succeeded, summary.failed, summary.failed_steps) == (12, 0, len(good))
    for line in read(out):
        assert line["label"] is not None
        assert (line["reason"], line["title"]) == (None, None)
    errors = [json.loads(line) for line in out.with_name("out.jsonl.errors.jsonl").read_text().splitlines()]
    assert [(error["step"], error["code"]) for error in errors] == [
        ("why", "invalid_job"),
        ("title", "parent_failed"),
    ] * len(good)
    assert errors[1]["message"] == "step why has failed: invalid_job: no good"
    told = next(line for line in read(out) if line["text"] == good[0])["_pagemill"]["steps"]
    assert told["why"] == {"error": "invalid_job: no good"}
    assert summary.steps is not None
    assert (summary.steps.first_failure or "").endswith("invalid_job: step why: no good")
    with pytest.raises(TooManyErrors):
        RecipePipeline(RECIPE).run(rows(12), out=tmp_path / "o.jsonl", producer=producer, max_errors=1)
    (tmp_path / "o.jsonl.partial").unlink()
    model.ran.clear()
    model.failing = None
    RecipePipeline(RECIPE).run(rows(12), out=out, producer=producer)
    check(out, 12)
    assert sorted(model.ran) == sorted(
        [f"{text} is good ({prob(text)!r}): why?" for text in good] + [f"In a word, {reason(text)}" for text in good]
    )  # fmt: skip
    assert not out.with_name("out.jsonl.errors.jsonl").exists()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"gold": "g"}, "gold is not for a recipe: each step names"),
        ({"output_column": "o"}, "output_column is not for a recipe: each step names"),
        ({"label_temperature": 2.0}, "label_temperature is not for a recipe: the queue"),
        ({"escalate_below": 1.0}, "escalate_below is not for a recipe: `when` selects"),
        ({"to": "big"}, "to is not for a recipe: each step names"),
    ],
)
def test_an_option_that_a_recipe_cannot_have_is_refused_with_the_reason(
    option: dict[str, Any], says: str, producer: Producer, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=says):
        RecipePipeline(RECIPE).run(rows(2), out=tmp_path / "out.jsonl", producer=producer, **option)


def test_a_row_without_any_output_is_a_failed_row(producer: Producer, model: Model, tmp_path: Path) -> None:
    model.failing = "r1 "
    given = [*rows(3), {"text": None, "gold": "good"}]
    out = tmp_path / "out.jsonl"
    summary = RecipePipeline(RECIPE).run(given, out=out, producer=producer)
    assert (summary.rows, summary.succeeded, summary.failed) == (4, 2, 2)
    assert dict(summary.error_codes) == {"invalid_job": 1, "empty_row": 1}
    skipped = RecipePipeline(RECIPE).run(
        given, out=tmp_path / "b.jsonl", producer=producer, on_null="skip", on_empty="skip"
    )
    assert (skipped.succeeded, skipped.failed, skipped.skipped) == (2, 1, 1)


def test_equal_rows_run_once_and_may_share_a_first_step(
    producer: Producer, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first step of the later row has been collected, and the server no longer has it."""
    monkeypatch.setattr("pagemill.producer.dataset.work.CHUNK", 5)
    recipe = changed(1, prompt="{{ extra }}: {{ text }} is {{ label.text }}", when=None)
    given = [{"text": f"r{n % 4}", "extra": n // 8, "gold": None} for n in range(40)]
    summary = RecipePipeline(recipe).run(given, out=tmp_path / "out.jsonl", producer=producer, window=5)
    assert (summary.succeeded, summary.failed_steps) == (40, 0), summary.as_json()["steps"]
    assert set(model.ran.values()) == {1}
    assert len(model.ran) == 4 + 20 + 20
    facts = summary.as_json()["steps"]
    assert [step["rows"] for step in facts] == [40, 40, 40]
    assert [step["prompt_tokens"] for step in facts] == [40, 200, 200]


def test_samples_of_equal_rows_differ_and_their_steps_belong_together(
    producer: Producer, model: Model, tmp_path: Path
) -> None:
    recipe = changed(0, label_probs=None, temperature=1.0)
    recipe["steps"][1] |= {"prompt": "{{ label.text }}", "when": None}
    summary = RecipePipeline(recipe).run(
        [{"text": "same", "gold": None}] * 3, out=tmp_path / "out.jsonl", producer=producer
    )
    assert summary.succeeded == 3
    assert model.ran["same is"] == 3


def test_texts_of_rows_are_never_places(producer: Producer, model: Model, tmp_path: Path) -> None:
    odd = ["{label.text}", "{{label.text}} {why.text}", "{", "}", "{a} {{ text }}"]
    recipe = changed(1, prompt='{"it": {{ label.text }}, "text": "{{ text }}"}', when=None)
    out = tmp_path / "out.jsonl"
    given = [{"text": text, "gold": None} for text in odd]
    RecipePipeline(recipe).run(given, out=out, producer=producer)
    for line, text in zip(read(out), odd, strict=True):
        assert line["text"] == text
        assert line["reason"] == f'<{{"it": {line["label"]}, "text": "{text}"}}>'


def test_examples_are_turns_before_the_row(producer: Producer, model: Model, tmp_path: Path) -> None:
    recipe = {
        "model": "m",
        "steps": [
            {
                "name": "label", "system": "You label.", "prompt": "{{ text }}", "choices": ["good", "bad"],
                "examples": [{"text": "a {label.text}", "output": "bad"}, {"text": "b", "output": "good"}],
            },
            {
                "name": "why", "prompt": "{{ text }} is {{ label.label }}", "examples": [
                    {"text": "c", "label": "bad", "output": {"because": 1}}
                ],
            },
        ],
    }  # fmt: skip
    out = tmp_path / "out.jsonl"
    RecipePipeline(recipe).run([{"text": "d"}], out=out, producer=producer)
    first, second = [[(turn.role, turn.text) for turn in job.messages or ()] for job in model.jobs]
    assert first == [
        ("system", "You label."), ("user", "a {label.text}"), ("assistant", "bad"), ("user", "b"),
        ("assistant", "good"), ("user", "d"),
    ]  # fmt: skip
    assert second[:2] == [("user", "c is bad"), ("assistant", '{"because": 1}')]
    assert second[2:] == [("user", f"d is {read(out)[0]['label']}")]


@pytest.mark.parametrize("make", [pandas.DataFrame, polars.DataFrame])
def test_a_frame_has_a_column_for_each_step(make: Any, producer: Producer) -> None:
    frame = RecipePipeline(RECIPE).run(make(rows(8)), producer=producer).frame
    assert list(frame.columns) == ["text", "gold", "label", "label_prob", "label_probs", "reason", "title"]
    titles = [None if value != value else value for value in frame["title"].to_list()]
    assert titles == [title(f"r{n}") for n in range(8)]


def test_detached_the_whole_chain_runs_without_its_producer(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    from pagemill.producer.dataset.frames import source_of
    from pagemill.producer.dataset.run import DatasetRun

    model = Model()
    with Producer(valkey_url, queue=queue_name) as producer:
        run = DatasetRun(source_of(rows(10)), tmp_path / "out.jsonl", RecipePipeline(RECIPE).recipe)
        assert run.detach(producer).submitted == 30
    good = sum(is_good(f"r{n}") for n in range(10))
    with scripted_worker(valkey_url, queue_name, model):
        give_up = time.monotonic() + 60
        while sum(model.ran.values()) < 10 + 2 * good and time.monotonic() < give_up:
            time.sleep(0.01)
        with Producer(valkey_url, queue=queue_name) as producer:
            RecipePipeline(RECIPE).run(rows(10), out=tmp_path / "out.jsonl", producer=producer)
    check(tmp_path / "out.jsonl", 10)
    assert set(model.ran.values()) == {1}


def test_what_the_server_has_lost_is_done_again_and_nothing_else(
    producer: Producer, model: Model, tmp_path: Path, valkey_queue: Queue
) -> None:
    """The outputs in the journal are inserted into the prompts of the remaining steps."""
    out = tmp_path / "out.jsonl"
    model.failing, model.how = "In a word", "dead"
    with pytest.raises(TooManyErrors):
        RecipePipeline(RECIPE).run(rows(12), out=out, producer=producer, max_errors=0)
    for key in valkey_queue.client.scan_iter(f"{valkey_queue.prefix}*"):
        valkey_queue.client.delete(key)
    model.failing = None
    before = model.ran.copy()
    RecipePipeline(RECIPE).run(rows(12), out=out, producer=producer)
    check(out, 12)
    assert all(prompt.startswith("In a word") for prompt in model.ran - before if before[prompt])


@pytest.mark.slow
def test_killed_in_the_middle_of_chains_it_computes_nothing_twice(
    model: Model, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    recipe, source, out = tmp_path / "recipe.yaml", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    recipe.write_text(json.dumps(RECIPE))  # JSON is YAML
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(150)))
    command = [sys.executable, "-c", RUN, valkey_url, queue_name, *map(str, (recipe, source, out))]
    model.delay_s = 0.001
    kills = killed_until_done(
        command, out.exists, lambda: sum(model.ran.copy().values()),
        chance=random.Random(3), steps=range(20, 90), max_kills=4,
    )  # fmt: skip
    assert kills >= 2
    assert set(model.ran.values()) == {1}, "something was computed twice"
    check(out, 150)
