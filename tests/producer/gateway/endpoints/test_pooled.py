"""Vectors, labels and scores over HTTP, as the openai and cohere packages request them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from transformers import AutoModel

from tests.engine.pooling.test_labels import saved as save_classifier
from tests.engine.pooling.tiny_pooling import ENCODERS, engine_of, run, save_base, texts_of_all_lengths
from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

TEXTS = texts_of_all_lengths(12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_base(directory / "embedder", ENCODERS["bert"], AutoModel)
    save_classifier(directory / "judge", "bert", 1)
    save_classifier(directory / "sorter", "bert", 3, id2label={0: "bad", 1: "fair", 2: "good"})
    return directory


@pytest.fixture(scope="module")
def served(valkey_url: str, queue: str, models: Path) -> Iterator[Served]:
    configs = [
        worker_config(valkey_url, queue, model=str(models / name), num_threads=1)
        for name in ("embedder", "judge", "sorter")
    ]
    with (
        running_worker(configs[0]),
        running_worker(configs[1]),
        running_worker(configs[2]),
        running_worker(worker_config(valkey_url, queue, model="echo")),
        gateway(valkey_url, queue) as served,
    ):
        served.wait_for("embedder", "judge", "sorter", "echo")
        yield served


def ask(served: Served, url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{url}", json=body, timeout=PATIENCE_S)


@pytest.mark.slow
def test_openai_s_vectors(client: OpenAI, models: Path) -> None:
    wanted = run(engine_of(models / "embedder"), "embed", TEXTS)
    for encoding in ("base64", "float"):
        answer = client.embeddings.create(model="embedder", input=TEXTS, encoding_format=encoding)  # type: ignore[arg-type]
        vectors: list[Any] = [row.embedding for row in answer.data]
        if isinstance(vectors[0], str):
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        assert np.abs(np.array(vectors) - wanted).max() < 1e-5
        assert [row.index for row in answer.data] == list(range(len(TEXTS)))
        assert answer.usage.prompt_tokens == sum(len(text.split()) + 2 for text in TEXTS)
    by_default = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=4, user="u")
    assert np.abs(np.array(by_default.data[0].embedding) - wanted[0, :4]).max() < 1e-5


@pytest.mark.slow
def test_token_ids(client: OpenAI) -> None:
    text, ids = "w1 w2", [1, 5, 6, 2]
    wanted = client.embeddings.create(model="embedder", input=text).data[0].embedding
    for given in (ids, [ids]):
        found = client.embeddings.create(model="embedder", input=given).data[0].embedding  # type: ignore[arg-type]
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
def test_cohere_s_ranking(served: Served, models: Path) -> None:
    scores = run(engine_of(models / "judge"), "rerank", TEXTS, query="w1 w2")[:, 0]
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    with httpx.Client(timeout=PATIENCE_S) as transport:
        newer = cohere.ClientV2(api_key="none", base_url=served.url, httpx_client=transport)
        ranked = newer.rerank(model="judge", query="w1 w2", documents=TEXTS, top_n=5)
        older = cohere.Client(api_key="none", base_url=served.url, httpx_client=transport)
        again = older.rerank(model="judge", query="w1 w2", documents=TEXTS, return_documents=True)
    assert [row.index for row in ranked.results] == order[:5]
    best = scores[order[:5]].tolist()
    assert [row.relevance_score for row in ranked.results] == pytest.approx(best, abs=1e-5)
    assert [row.index for row in again.results] == order
    assert [row.document.text for row in again.results if row.document] == [TEXTS[index] for index in order]


def test_jina_s_ranking(served: Served) -> None:
    documents = [{"text": text} for text in TEXTS]
    body = {"model": "judge", "query": "w1", "documents": documents, "top_n": 2, "return_documents": True}
    answer = ask(served, "/v1/rerank", **body).json()
    assert len(answer["results"]) == 2
    assert answer["usage"]["total_tokens"] > 0
    assert answer["results"][0]["document"]["text"] in TEXTS


def test_scores_of_pairs(served: Served, models: Path) -> None:
    engine = engine_of(models / "judge")
    wanted = run(engine, "rerank", TEXTS[:3], query=TEXTS[0])[:, 0].tolist()
    found = ask(served, "/v1/score", model="judge", text_1=TEXTS[0], text_2=TEXTS[:3]).json()["data"]
    assert [row["score"] for row in found] == pytest.approx(wanted, abs=1e-5)
    found = ask(served, "/v1/score", model="judge", text_1=[TEXTS[0]] * 3, text_2=TEXTS[:3]).json()["data"]
    assert [row["score"] for row in found] == pytest.approx(wanted, abs=1e-5)


def test_labels(served: Served, models: Path) -> None:
    wanted = run(engine_of(models / "sorter"), "classify", TEXTS[:3])
    found = ask(served, "/v1/classify", model="sorter", input=TEXTS[:3]).json()["data"]
    assert np.abs(np.array([row["probs"] for row in found]) - wanted).max() < 1e-5
    assert [row["label"] for row in found] == [("bad", "fair", "good")[row.argmax()] for row in wanted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "body", "status", "told"),
    [
        ("/v1/embeddings", {"input": ""}, 400, "input.0 is empty"),
        ("/v1/embeddings", {"input": []}, 400, "input is a text"),
        ("/v1/embeddings", {"input": ["a", []]}, 400, "input.1 is empty"),
        ("/v1/embeddings", {"input": [1, "a"]}, 400, "input is a text"),
        ("/v1/embeddings", {"input": [["a"]]}, 400, "token ids are integers"),
        ("/v1/embeddings", {}, 400, "input is a text"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 64}, 400, "vectors have 32, ask for 1 to 32"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "float or base64"),
        ("/v1/embeddings", {"input": "a", "magic": 1}, 400, "parameter magic is not supported"),
        ("/v1/embeddings", {"input": "a", "stream": True}, 400, "can't stream"),
        ("/v1/embeddings", {"input": "w1 " * 100}, 400, "the model takes 60"),
        ("/v1/embeddings", {"input": "a", "model": "sorter"}, 400, "classifies texts: use /v1/classify"),
        (
            "/v1/embeddings",
            {"input": "a", "model": "echo"},
            400,
            "use /v1/chat/completions or /v1/completions, or start",
        ),
        ("/v1/embeddings", {"input": "a", "model": "nobody"}, 404, "does not exist"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "at most 2048"),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents is a list"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 5]}, 400, "documents.1 is a text"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, 400, "query is a text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, 400, "gives vectors: use /v1/embeddings"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, 400, "gives vectors: use /v1/embeddings"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "as long as text_2"),
        ("/v1/classify", {"input": "a"}, 400, "gives vectors: use /v1/embeddings"),
        ("/v1/completions", {"prompt": "a"}, 400, "gives vectors: use /v1/embeddings"),
    ],
)
def test_what_is_refused(served: Served, url: str, body: dict[str, Any], status: int, told: str) -> None:
    answer = ask(served, url, **{"model": "embedder"} | body)
    assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text


@pytest.mark.slow
def test_the_client_sees_openai_s_error(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="embedder", input="w1 " * 100)
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length" in refused.value.message


BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/embeddings": ({"model": "embedder"}, "input"),
    "/v1/completions": ({"model": "echo", "max_tokens": 3}, "prompt"),
    "/v1/rerank": (
        {"model": "judge", "documents": ["w1", "w2 w3", "w4"], "top_n": 2, "return_documents": True},
        "query",
    ),
    "/v1/score": ({"model": "judge", "text_1": "w1 w2"}, "text_2"),
    "/v1/classify": ({"model": "judge"}, "input"),
}
"""Bodies by URL, and the field that differs between lines."""


def _numbers(data: list[dict[str, Any]]) -> list[float]:
    return [number for row in data for number in row.get("probs", (row.get("score"),))]


@pytest.mark.slow
@pytest.mark.parametrize("url", BATCHES)
def test_batches(client: OpenAI, served: Served, models: Path, url: Any) -> None:
    body, name = BATCHES[url]
    rows = [
        {"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body | {name: text}}
        for number, text in enumerate(TEXTS)
    ]
    rows.append({"custom_id": "bad", "method": "POST", "url": url, "body": body})
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end")
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (len(TEXTS), 1)
    assert done.output_file_id is not None
    lines = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    lines.sort(key=lambda line: int(line["custom_id"].removeprefix("row-")))  # in order of completion
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows[:-1]]
    bodies = [line["response"]["body"] for line in lines]
    if url in ("/v1/score", "/v1/classify"):
        for found, text in zip(bodies, TEXTS, strict=True):
            alone = ask(served, url, **body | {name: text}).json()["data"]
            assert _numbers(found["data"]) == pytest.approx(_numbers(alone), abs=1e-5)
    elif url == "/v1/embeddings":
        wanted = run(engine_of(models / "embedder"), "embed", TEXTS)
        assert np.abs(np.array([body["data"][0]["embedding"] for body in bodies]) - wanted).max() < 1e-5
    elif url == "/v1/rerank":
        for row, found in zip(rows, bodies, strict=False):
            alone = ask(served, url, **row["body"]).json()["results"]
            assert [one["document"] for one in found["results"]] == [one["document"] for one in alone]
            scores = [one["relevance_score"] for one in alone]
            assert [one["relevance_score"] for one in found["results"]] == pytest.approx(scores, abs=1e-5)
    else:
        assert all(body["choices"][0]["text"] for body in bodies)
