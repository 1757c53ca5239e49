"""Files of OpenAI's Batch API: read unchanged, answered in a form that the openai package's types accept."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.openai.batch_file import BatchFile
from pagemill.producer.openai.formats import CHAT_URL, COMPLETIONS_URL
from pagemill.producer.openai.lines import LINE_URLS, BatchRequest, BatchRequests, job_of, success_line
from pagemill.producer.wire.schema.errors import InvalidJob
from tests.producer.scripted_worker import scripted_worker


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer:
        yield producer


def request(name: str, text: str = "hi", url: str = COMPLETIONS_URL, **body: Any) -> dict[str, Any]:
    prompt = {"prompt": text} if url == COMPLETIONS_URL else {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **prompt, **body}}


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in requests))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_runs_unchanged(producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    requests = [request(f"r{i}", f"text {i % 7}", temperature=0, user="u", stream=False) for i in range(20)]
    requests.insert(5, request("bad", "fail this"))
    requests.insert(9, {**request("odd"), "url": "/v1/embeddings"})
    batch = BatchFile(write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    with scripted_worker(valkey_url, queue_name):
        summary = batch.execute(producer)
    assert (summary.total, summary.completed, summary.failed) == (22, 20, 2)
    found = lines(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in found] == [f"r{i}" for i in range(20)]
    for line in found:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        body = Completion.model_validate(line["response"]["body"])
        assert body.choices[0].text == f"text {int(line['custom_id'][1:]) % 7}"
        assert body.choices[0].finish_reason in ("stop", "length")
        assert abs(body.created - time.time()) < 600
    errors = {line["custom_id"]: line for line in lines(batch.errors_path)}
    assert errors.keys() == {"bad", "odd"}
    assert errors["odd"]["response"]["status_code"] == 400
    assert errors["odd"]["response"]["body"]["error"]["code"] == "unsupported_feature"


def test_a_chat_answer_with_logprobs_is_what_the_openai_package_expects() -> None:
    token = {"token_id": 5, "logprob": -0.5, "text": "hé"}
    kept = {
        "model": "m", "created": 1, "usage": {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2},
        "outputs": [
            {"index": 0, "text": "hé", "finish_reason": "stop", "logprobs": [{"chosen": token, "top": [token]}]}
        ],
    }  # fmt: skip
    line = request("r", url=CHAT_URL, logprobs=True, top_logprobs=1, max_completion_tokens=4)
    job = job_of(line)
    assert (job.logprobs, job.max_tokens) == (1, 4)
    asked = BatchRequest(1, "r", CHAT_URL, job)
    body = ChatCompletion.model_validate(success_line(asked, "k", kept)["response"]["body"])
    assert body.choices[0].message.content == "hé"
    assert body.choices[0].logprobs is not None
    assert body.choices[0].logprobs.content is not None
    assert bytes(body.choices[0].logprobs.content[0].bytes or []) == "hé".encode()
    assert body.usage is not None
    assert body.usage.total_tokens == 4


def test_content_in_parts() -> None:
    line = request("r", url=CHAT_URL)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    line["body"]["messages"] = [{"role": "user", "content": parts}]
    messages = job_of(line).messages
    assert messages is not None
    assert messages[0].content == "ab"
    url = "data:image/png;base64,AAAA"
    line["body"]["messages"][0]["content"].append(
        {"type": "image_url", "image_url": {"url": url, "detail": "original"}}
    )
    job = job_of(line)
    assert (job.images, job.messages and job.messages[0].text) == ((url,), "ab")
    for kind, reason in (
        ("input_audio", "audio is not supported yet"),
        ("poem", "only texts and images are"),
    ):
        line["body"]["messages"][0]["content"][-1]["type"] = kind
        with pytest.raises(InvalidJob, match=reason) as refused:
            job_of(line)
        assert refused.value.code == "unsupported_feature"


@pytest.mark.parametrize(
    ("requests", "match"),
    [
        ([request("a"), request("b"), request("a")], "requests 1 and 3"),
        ([{**request("a"), "custom_id": 7}], 'request 1: custom_id is not text; write "7"'),
        ([request("a"), {**request("a"), "custom_id": 1.5}], "request 2: custom_id is not text"),
        ([request("a"), {**request("a"), "custom_id": ["b"]}], "request 2: custom_id is not text"),
        ([{**request("a"), "custom_id": None}], "custom_id is missing"),
        ([{**request("a"), "custom_id": ""}], "custom_id is missing"),
        ([], "no requests"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_before_anything_runs(
    tmp_path: Path, requests: list[dict[str, Any]], match: str
) -> None:
    batch = BatchFile(write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    with pytest.raises(DatasetError, match=match):
        batch.check()


BODIES: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS_URL: {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v1/score": {"text_1": "hi", "text_2": ["a", "b"]},
    "/v1/classify": {"input": ["hi", "ho"]},
    "/v1/responses": {"input": "hi"},
}


def test_every_url_is_tried() -> None:
    assert set(BODIES) == set(LINE_URLS)


@pytest.mark.parametrize("url", LINE_URLS)
@pytest.mark.parametrize("method", ["POST", "post", "Post"])
def test_lines_for_azure_are_read(url: str, method: str) -> None:
    line = {"custom_id": "a", "method": method, "url": url, "body": {"model": "m", **BODIES[url]}}
    assert job_of({**line, "url": url.removeprefix("/v1")}) == job_of(line)


@pytest.mark.parametrize(
    "changed", [{"method": "GET"}, {"method": None}, {"url": "/v1/files"}, {"url": "/files"}, {"url": 7}]
)
def test_other_lines_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="only POST to"):
        job_of(request("a") | changed)


def test_a_file_for_azure_runs(producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    requests = [{**request("a", url=CHAT_URL), "url": "/chat/completions", "method": "post"}]
    path = write(tmp_path / "in.jsonl", requests)
    assert BatchRequests(path).check(url=CHAT_URL) == 1
    with scripted_worker(valkey_url, queue_name):
        assert BatchFile(path, tmp_path / "out.jsonl").execute(producer).completed == 1
    (line,) = lines(tmp_path / "out.jsonl")
    assert ChatCompletion.model_validate(line["response"]["body"]).choices[0].message.content is not None


@pytest.mark.parametrize("text", ['[{"custom_id": "a"}]', '[\n{"custom_id": "a"}\n]'])
def test_a_json_array_is_refused_with_a_hint(text: str, tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match="one JSON value") as refused:
        BatchFile(path, tmp_path / "out.jsonl").check()
    assert str(refused.value).count("in.json") == 1


def test_a_broken_line_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request("a")) + "\n{torn")
    with pytest.raises(DatasetError, match="request 2"):
        BatchFile(path, tmp_path / "out.jsonl").check()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    with pytest.raises(DatasetError, match="not a regular file"):
        BatchFile(tmp_path / "in.jsonl", tmp_path / "out.jsonl").check()


def test_a_file_that_is_not_utf_8_is_refused_without_options_of_other_commands(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    text = json.dumps(request("caf\u00e9"), ensure_ascii=False)
    for data, says in (
        (text.encode("latin-1"), "convert the file to UTF-8"),
        (gzip.compress(text.encode()), "the file is gzip data"),
    ):
        path.write_bytes(data)
        with pytest.raises(DatasetError, match=says) as refused:
            BatchFile(path, tmp_path / "out.jsonl").check()
        assert "--" not in str(refused.value)


@pytest.mark.slow
def test_an_expired_batch_keeps_its_finished_rows(
    producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    requests = [request("in-time", "fast"), request("late", "fast", model="nobody-serves-this")]
    batch = BatchFile(write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    batch.deadline = time.time() + 2
    with scripted_worker(valkey_url, queue_name):
        summary = batch.execute(producer)
    assert (summary.completed, summary.failed) == (1, 1)
    assert [line["custom_id"] for line in lines(tmp_path / "out.jsonl")] == ["in-time"]
    assert lines(batch.errors_path)[0]["error"]["code"] == "batch_expired"


def test_a_cancelled_batch_keeps_its_finished_rows(
    producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    def stop(tally: Any) -> None:
        if tally.succeeded:
            raise Stopped

    requests = [request("done", "fast"), request("never", "x", model="nobody-serves-this")]
    batch = BatchFile(write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    with scripted_worker(valkey_url, queue_name):
        with pytest.raises(Stopped):
            batch.execute(producer, stop)
        assert batch.cancel(producer) == 1
        summary = batch.deliver(producer)
    assert [line["custom_id"] for line in lines(tmp_path / "out.jsonl")] == ["done"]
    assert lines(batch.errors_path)[0]["error"]["code"] == "batch_cancelled"
    assert summary.completed == 1
