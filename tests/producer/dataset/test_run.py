"""Dataset runs on a real server: after kills at any point, the file is the same and no job runs twice."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError, RunStopped
from pagemill.producer.dataset.journal import Journal
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.work import TooManyErrors, Work, WorkLoop
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from tests.producer.dataset.killing import killed_until_done
from tests.producer.driving import Queue
from tests.producer.scripted_worker import echo, scripted_worker

RUN = """
import json, sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out = sys.argv[1:]
with Producer(url, queue=queue) as producer:
    pipeline = Pipeline("{{ text }}", model="m", chat=False)
    pipeline.run(source, out=out, producer=producer, window=200)
"""

_FORGET = """
local cursor = '0'
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000)
  cursor = page[1]
  for _, key in ipairs(page[2]) do redis.call('DEL', key) end
until cursor == '0'
"""


@contextmanager
def counting_worker(url: str, name: str, delay_s: float = 0.0) -> Iterator[Counter[str]]:
    """An echo worker that counts how often it ran each prompt."""
    ran: Counter[str] = Counter()

    def run(queue: Queue, pulled: PulledJob) -> None:
        ran[Job.from_payload(pulled.payload).prompt or ""] += 1
        time.sleep(delay_s)
        echo(queue, pulled)

    with scripted_worker(url, name, run):
        yield ran


@pytest.fixture
def ran(valkey_url: str, queue_name: str) -> Iterator[Counter[str]]:
    """A counting worker of the test's queue."""
    with counting_worker(valkey_url, queue_name) as ran:
        yield ran


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def simple(**options: Any) -> Pipeline:
    return Pipeline("{{ text }}", model="m", chat=False, **options)


def test_every_row_in_its_order(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [f"row {i}" for i in range(300)])
    seen: list[Any] = []
    summary = simple().run(source, out=tmp_path / "out.jsonl", producer=producer, on_row=seen.append)
    found = lines(tmp_path / "out.jsonl")
    assert [(row["text"], row["n"], row["output"]) for row in found] == [
        (f"row {i}", i, f"row {i}") for i in range(300)
    ]
    assert [row["_pagemill"]["row"] for row in found] == list(range(1, 301))
    assert len({row["_pagemill"]["key"] for row in found}) == 300
    assert seen == found
    assert (summary.rows, summary.succeeded, summary.failed, summary.unfinished) == (300, 300, 0, 0)
    assert not (tmp_path / "out.jsonl.partial").exists()
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_equal_rows_run_once(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["same"] * 5 + ["other"])
    summary = simple().run(source, out=tmp_path / "out.jsonl", producer=producer)
    assert ran == {"same": 1, "other": 1}
    assert [row["output"] for row in lines(tmp_path / "out.jsonl")] == ["same"] * 5 + ["other"]
    assert summary.merged == 4
    keys = {row["_pagemill"]["key"] for row in lines(tmp_path / "out.jsonl")}
    assert len(keys) == 6


def test_equal_rows_of_a_sampled_run_differ(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["same"] * 5)
    simple(temperature=1.0).run(source, out=tmp_path / "out.jsonl", producer=producer)
    assert ran == {"same": 5}


def test_bad_and_failed_rows_are_told_apart_from_good_ones(
    producer: Producer, ran: Counter[str], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["good", "fail this", "good too"])
    with source.open("a") as file:
        file.write('{broken\n{"other": 1}\n')
    out = tmp_path / "out.jsonl"
    summary = simple().run(source, out=out, producer=producer)
    assert [row["output"] for row in lines(out)] == ["good", "good too"]
    errors = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert [(error["row"], error["code"]) for error in errors] == [
        (2, "invalid_job"), (4, "invalid_json"), (5, "template_error"),
    ]  # fmt: skip
    assert all(error["message"] for error in errors)
    assert (summary.rows, summary.succeeded, summary.failed) == (5, 2, 3)
    assert sum(summary.error_codes.values()) == summary.failed


def test_running_again_does_only_what_is_new(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(20)]
    out = tmp_path / "out.jsonl"
    simple().run(write_rows(tmp_path / "in.jsonl", texts), out=out, producer=producer)
    first = out.read_bytes()
    simple().run(tmp_path / "in.jsonl", out=out, producer=producer)
    assert out.read_bytes() == first
    simple().run(write_rows(tmp_path / "in.jsonl", ["new", *texts[5:]]), out=out, producer=producer)
    assert set(ran.values()) == {1}
    assert [row["output"] for row in lines(out)] == ["new", *texts[5:]]


def test_a_failed_row_is_tried_again_the_next_time(
    producer: Producer, ran: Counter[str], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["die young", "fine"])
    out = tmp_path / "out.jsonl"
    assert simple().run(source, out=out, producer=producer).failed == 1
    assert simple().run(source, out=out, producer=producer).failed == 1
    assert ran == {"die young": 2, "fine": 1}


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.parquet"])
def test_other_output_formats_can_be_taken_up_again(
    producer: Producer, ran: Counter[str], tmp_path: Path, name: str
) -> None:
    from pagemill.producer.dataset.tables.rows import open_source

    source = write_rows(tmp_path / "in.jsonl", ["a,b", 'quote "x"', "line\nbreak"])
    for _ in range(2):
        simple().run(source, out=tmp_path / name, producer=producer)
    rows = [row.fields for row in open_source(tmp_path / name).rows()]
    assert [row["output"] for row in rows if row] == ["a,b", 'quote "x"', "line\nbreak"]
    assert set(ran.values()) == {1}


def test_an_iterator_is_read_once(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    rows = ({"text": f"row {i}"} for i in range(30))
    summary = simple().run(rows, out=tmp_path / "out.jsonl", producer=producer)
    assert summary.succeeded == 30
    assert [row["output"] for row in lines(tmp_path / "out.jsonl")] == [f"row {i}" for i in range(30)]


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_file(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    texts = [f"row {i % 900}" for i in range(1_000)]
    source = write_rows(tmp_path / "in.jsonl", texts)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", RUN, valkey_url, queue_name, str(source), str(out)]
    with counting_worker(valkey_url, queue_name, 0.001) as ran:
        kills = killed_until_done(
            command, out.exists, lambda: sum(ran.values()),
            chance=random.Random(7), steps=range(1, 250), max_kills=6, last=900,
        )  # fmt: skip
    assert kills >= 3
    assert len(ran) == 900
    assert set(ran.values()) == {1}, "something was paid for twice"
    assert [(row["n"], row["output"]) for row in lines(out)] == list(enumerate(texts))


def test_a_server_that_forgot_everything_costs_only_what_was_under_way(
    producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new server, or a flushed one: the journal has the finished rows, the rest is submitted again."""
    import redis

    monkeypatch.setattr("pagemill.producer.dataset.work.LOST_AFTER_S", 0.5)
    source = write_rows(tmp_path / "in.jsonl", [f"row {i}" for i in range(50)])
    wiped = threading.Event()
    ran: Counter[str] = Counter()

    def run(queue: Queue, pulled: PulledJob) -> None:
        if sum(ran.values()) == 20 and not wiped.is_set():
            wiped.set()
            with redis.Redis.from_url(
                valkey_url
            ) as client:  # at one moment, as if by a flush or a new server
                client.eval(_FORGET, 0, f"pagemill:{{{queue_name}}}:*")
            return
        ran[Job.from_payload(pulled.payload).prompt or ""] += 1
        queue.commit(pulled, Job.from_payload(pulled.payload).prompt or "")

    with scripted_worker(valkey_url, queue_name, run):
        summary = simple().run(source, out=tmp_path / "out.jsonl", producer=producer)
    assert wiped.is_set()
    assert summary.succeeded == 50


def test_two_runs_on_one_output_are_kept_apart(tmp_path: Path, producer: Producer) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["x"])
    with Journal(tmp_path / "out.jsonl.partial"), pytest.raises(DatasetError, match="another run"):
        simple().run(source, out=tmp_path / "out.jsonl", producer=producer)


def test_too_many_errors_stop_the_run_and_lose_nothing(
    producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [f"fail {i}" for i in range(30)])
    with (
        counting_worker(valkey_url, queue_name),
        pytest.raises(TooManyErrors, match="more than --max-errors 3"),
    ):
        simple().run(source, out=tmp_path / "out.jsonl", producer=producer, max_errors=3)
    assert (tmp_path / "out.jsonl.partial").exists()
    assert not (tmp_path / "out.jsonl").exists()


def test_a_strangers_file_is_not_overwritten(tmp_path: Path, producer: Producer) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["x"])
    out = tmp_path / "out.jsonl"
    out.write_text('{"precious": true}\n')
    with pytest.raises(DatasetError, match="not written by a run"):
        simple().run(source, out=out, producer=producer)
    assert out.read_text() == '{"precious": true}\n'
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_an_output_column_that_is_taken_is_refused(tmp_path: Path, producer: Producer) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "x", "output": "precious"}\n')
    with pytest.raises(DatasetError, match="--output-column"):
        simple().run(source, out=tmp_path / "out.jsonl", producer=producer)


def test_a_later_row_with_the_outputs_column_is_one_bad_row(
    tmp_path: Path, producer: Producer, ran: Counter[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "x"}\n{"text": "y", "output": "precious"}\n')
    summary = simple().run(source, out=tmp_path / "out.jsonl", producer=producer)
    assert (summary.succeeded, summary.error_codes, ran) == (1, {"invalid_row": 1}, {"x": 1})


def test_an_input_that_breaks_off_in_the_middle_stops_the_run(
    tmp_path: Path, producer: Producer, valkey_url: str, queue_name: str
) -> None:
    """Unlike a DatasetError at startup, after which no job has run."""
    rows = "".join(json.dumps({"text": random.Random(i).randbytes(60).hex()}) + "\n" for i in range(2_000))
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(rows.encode())[:-20_000])
    with counting_worker(valkey_url, queue_name), pytest.raises(RunStopped, match="cannot be read"):
        simple().run(source, out=tmp_path / "out.jsonl", producer=producer)


def test_a_later_start_may_submit_the_same_work_with_another_prompt(
    tmp_path: Path, producer: Producer
) -> None:
    """A step's prompt has placeholders for outputs, and after a restart the outputs: this is not a key conflict."""
    works = [Work("k", Job(prompt=text, model="m")) for text in ("a place", "its output")]
    for work in works:
        with Journal(tmp_path / "out.partial") as journal:
            journal.forget_pending()
            WorkLoop(producer, journal).run(lambda work=work: iter([work]), collect=False)
            batch = producer.batch(journal.fact("batch_id") or "")
    assert (batch.counts().total, batch.counts().failed) == (1, 0)


def test_gold_gives_accuracy(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [("a", "a"), ("b", "a"), ("b", "b"), ("a", "a")]
    source.write_text("".join(json.dumps({"text": text, "gold": gold}) + "\n" for text, gold in rows))
    summary = simple().run(source, out=tmp_path / "out.jsonl", producer=producer, gold="gold")
    assert summary.accuracy == 0.75
    assert summary.confusion == {("a", "a"): 2, ("a", "b"): 1, ("b", "b"): 1}
    assert summary.labels.as_json() == {"a": 2, "b": 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_the_rows(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    """The memory of the run's process: its peak after 120,000 rows compared with its peak after 30,000."""
    measured = RUN + "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    peaks = []
    for count in (30_000, 120_000):
        source = write_rows(tmp_path / f"{count}.jsonl", [f"row {i}" for i in range(count)])
        command = [sys.executable, "-c", measured, valkey_url, f"{queue_name}-{count}", str(source)]
        with scripted_worker(valkey_url, f"{queue_name}-{count}"):
            done = subprocess.run(
                [*command, str(tmp_path / f"{count}.out.jsonl")], capture_output=True, text=True, check=False
            )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] * 1.15 + 8_192, f"{peaks} KiB"
