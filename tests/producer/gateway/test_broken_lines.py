"""Batch files with one broken line of each kind: some fail the complete file, the others only their line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch

from pagemill.producer.dataset.tables import rows as table_rows
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.producer.gateway.test_batches import connect, end_of, rows_of
from tests.worker.harness import running_worker, worker_config

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}]
LARGE = "1e400"
AUDIO = [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]


def line(name: str, fields: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    plain = {"model": "echo", "messages": MESSAGES, "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": URL, "body": plain | body} | (fields or {})


GOOD = {
    "plain": line("plain"),
    # A batch cannot stream: OpenAI's clients may leave the field in, and the response is complete.
    "streamed": line("streamed", stream=True, stream_options={"include_usage": True}),
}
BROKEN = {
    "wrong-method": (line("wrong-method", {"method": "GET"}), 400, "unsupported_feature"),
    "no-method": (line("no-method", {"method": None}), 400, "unsupported_feature"),
    "no-body": (line("no-body", {"body": None}), 400, "invalid_job"),
    "no-model": (line("no-model", model=None), 400, "invalid_job"),
    "unknown-model": (line("unknown-model", model="ecko"), 404, "model_not_found"),
    "model-not-allowed": (line("model-not-allowed", model="secret"), 403, "model_not_allowed"),
    "invalid-model-name": (line("invalid-model-name", model="a b"), 400, "invalid_job"),
    "invalid-value": (line("invalid-value", temperature=-1), 400, "invalid_job"),
    "invalid-type": (line("invalid-type", max_tokens="many"), 400, "invalid_job"),
    "unknown-parameter": (line("unknown-parameter", temprature=1), 400, "unsupported_feature"),
    "unsupported-parameter": (line("unsupported-parameter", store=True), 400, "unsupported_feature"),
    "image": (line("image", messages=[{"role": "user", "content": IMAGE}]), 400, "invalid_image"),
    "audio": (line("audio", messages=[{"role": "user", "content": AUDIO}]), 400, "unsupported_feature"),
    **{
        f"large-{name}": (line(f"large-{name}", **{name: LARGE}), 400, "invalid_job")
        for name in ("max_tokens", "temperature", "top_p", "presence_penalty", "seed", "n")
    },
    "no-messages": (line("no-messages", messages=None), 400, "invalid_job"),
    "empty-messages": (line("empty-messages", messages=[]), 400, "invalid_job"),
    "long-prompt": (
        line("long-prompt", messages=[{"role": "user", "content": "x " * 3_000}]), 400, "context_length_exceeded",
    ),
    "long-message": (
        line("long-message", messages=[{"role": "user", "content": "x" * 1_100_000}]), 400, "invalid_job",
    ),
    "large": (
        line("large", messages=[{"role": "user", "content": "x" * 600_000}] * 2), 413, "payload_too_large",
    ),
}  # fmt: skip


def start_file(client: OpenAI, text: bytes) -> Batch:
    file = client.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")


def text_of(*rows: dict[str, Any]) -> bytes:
    """The lines of a file; the text LARGE represents a number beyond 64 bits."""
    return b"".join(json.dumps(row).replace(f'"{LARGE}"', LARGE).encode() + b"\n" for row in rows)


@pytest.mark.slow
def test_each_broken_line_fails_by_itself(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = write_keys(path, shop={"tenant": "shop", "models": ("echo", "ecko")})
    config = worker_config(valkey_url, queue_name, model="echo:0", max_model_len=2048)
    with (
        running_worker(config),
        gateway(valkey_url, queue_name, keys_path=path, unknown_model_s=0.0) as served,
        connect(served, keys["shop"]) as client,
    ):
        broken = [row for row, _, _ in BROKEN.values()]
        batch = end_of(client, start_file(client, text_of(GOOD["plain"], *broken, GOOD["streamed"])).id)
        assert batch.status == "completed"
        answers = rows_of(client, batch.output_file_id)
        assert [row["custom_id"] for row in answers] == list(GOOD)
        for row in answers:
            assert row["response"]["body"]["object"] == "chat.completion"
            assert row["response"]["body"]["choices"][0]["message"]["content"]
        errors = rows_of(client, batch.error_file_id)
        found = {
            row["custom_id"]: (row["response"]["status_code"], row["response"]["body"]["error"]["code"])
            for row in errors
        }
        assert found == {name: (status, code) for name, (_, status, code) in BROKEN.items()}
        assert sorted(row["custom_id"] for row in errors) == sorted(BROKEN)
        assert batch.request_counts is not None
        total = len(GOOD) + len(BROKEN)
        assert batch.request_counts.to_dict() == {
            "total": total, "completed": len(GOOD), "failed": len(BROKEN),
        }  # fmt: skip
        assert batch.usage is not None
        assert batch.usage.output_tokens == 3 * len(GOOD)


REFUSED = {
    "invalid-json": (b'{"custom_id": "torn", ', "invalid_json_line"),
    "no-object": (b"[1, 2]\n", "invalid_json_line"),
    "not-utf-8": (b'{"custom_id": "\xff"}\n', "invalid_json_line"),
    "no-custom-id": (text_of(line("x", {"custom_id": None})), "missing_custom_id"),
    "empty-custom-id": (text_of(line("")), "missing_custom_id"),
    "duplicate-custom-id": (text_of(GOOD["plain"]), "duplicate_custom_id"),
    "wrong-url": (text_of(line("x", {"url": "/v1/completions"})), "mismatched_url"),
    "unknown-url": (text_of(line("x", {"url": "/v1/moderations"})), "mismatched_url"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_broken_line_fails_the_file_as_a_whole(served: Served, client: OpenAI, kind: str) -> None:
    """As OpenAI's validation does: no line of the file runs, and `errors` names the line."""
    text, code = REFUSED[kind]
    batch = end_of(client, start_file(client, text_of(GOOD["plain"]) + text).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(row.code, row.line) for row in batch.errors.data] == [(code, 2)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


@pytest.mark.slow
def test_a_line_beyond_the_longest_fails_the_file(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "MAX_LINE_BYTES", 4096)
    large = line("large", messages=[{"role": "user", "content": "x" * 5000}])
    batch = end_of(client, start_file(client, text_of(GOOD["plain"], large)).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [row.line for row in batch.errors.data] == [2]
