"""The texts of log-probabilities' tokens, in every readable form of a result; the gateway's have separate tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.celery.task import plain_result
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import open_source
from tests.worker.harness import PATIENCE_S, running_worker, worker_config

pytestmark = pytest.mark.slow

TEXT = "a\u00fc!"
TOKENS = ["a", "bytes:\\xc3", "bytes:\\xbc", "!", "<end>"]
"""The two tokens in the middle are half a character each."""


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with (
        running_worker(worker_config(valkey_url, queue_name, model="echo")),
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        yield producer


def texts(logprobs: list[dict[str, Any]]) -> list[str]:
    for position in logprobs:
        assert position["chosen"] in position["top"]
        assert len({token["text"] for token in position["top"]}) == 2, "alternatives are told apart"
    return [position["chosen"]["text"] for position in logprobs]


def test_in_results_streams_and_what_celery_returns(producer: Producer) -> None:
    handle = producer.submit(prompt=TEXT, model="echo", max_tokens=8, logprobs=2, stream=True)
    streamed = [position for event in handle.stream() for position in event.logprobs or ()]
    result = handle.result(timeout=PATIENCE_S)
    assert texts([asdict(position) for position in streamed]) == TOKENS
    assert texts(plain_result(result)["outputs"][0]["logprobs"]) == TOKENS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_in_a_datasets_rows(producer: Producer, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    pipeline = Pipeline("{{ text }}", model="echo", chat=False, max_tokens=8, logprobs=2)
    for _ in range(2):  # the second resumes with the finished rows
        pipeline.run([{"text": TEXT}, {"text": TEXT + "b"}], out=out, producer=producer)
        (row, other) = [row.fields or {} for row in open_source(out).rows()]
        meta, last = (line["_pagemill"] for line in (row, other))
        if isinstance(meta, str):
            meta, last = json.loads(meta), json.loads(last)
        (sample,) = meta["logprobs"]
        assert texts(sample) == TOKENS
        assert texts(last["logprobs"][0]) == [*TOKENS[:4], "b", "<end>"]
        pipeline = Pipeline("{{ text }}", model="echo", chat=False, max_tokens=8, logprobs=2)
