"""Images in requests as the openai and anthropic packages send them; the echo model repeats a word for each."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, running_worker, worker_config

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


def chat(*urls: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "high"}} for url in urls]
    return [
        {"role": "user", "content": [{"type": "text", "text": "Is "}, *parts, {"type": "text", "text": "?"}]}
    ]


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=chat(URL, URL), max_tokens=50)
    assert answer.choices[0].message.content == "Is [image][image]?\n"
    stream = client.chat.completions.create(model="echo", messages=chat(URL), max_tokens=50, stream=True)
    assert (
        "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == "Is [image]?\n"
    )


def test_a_stored_chat(client: OpenAI) -> None:
    made = client.chat.completions.create(model="echo", messages=chat(URL), max_tokens=50, store=True)
    (message,) = client.chat.completions.messages.list(made.id)
    assert message.content == "Is ?"
    parts = (message.model_extra or {}).get("content_parts") or message.content_parts
    assert [part["type"] if isinstance(part, dict) else part.type for part in parts] == [
        "text",
        "image_url",
        "text",
    ]


def test_a_response_and_one_that_continues_it(client: OpenAI) -> None:
    content: Any = [
        {"type": "input_text", "text": "Is "},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    first = client.responses.create(
        model="echo", input=[{"role": "user", "content": content}], max_output_tokens=60, store=True
    )
    assert first.output_text == "Is [image]\n"
    second = client.responses.create(
        model="echo", input="this?", previous_response_id=first.id, max_output_tokens=60
    )
    assert second.output_text == "Is [image]\nIs [image]\n\nthis?\n"
    file: Any = [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]
    with pytest.raises(openai.BadRequestError, match="a file is not supported yet"):
        client.responses.create(model="echo", input=file)


def test_a_message(served: Served) -> None:
    sources: list[Any] = [
        {"type": "base64", "media_type": "image/png", "data": DATA},
    ]
    content: Any = [
        {"type": "text", "text": "Is "},
        *({"type": "image", "source": source} for source in sources),
    ]
    with Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as claude:
        message = claude.messages.create(
            model="echo", max_tokens=50, messages=[{"role": "user", "content": content}]
        )
        counted = claude.messages.count_tokens(model="echo", messages=[{"role": "user", "content": content}])
    assert message.content[0].text == "Is [image]\n"  # type: ignore[union-attr]
    assert counted.input_tokens == len("Is [image]\n")


@pytest.mark.slow
def test_limits(client: OpenAI) -> None:
    """The limit of a gateway without a store: a job has 1 MiB."""
    large = f"data:image/png;base64,{base64.b64encode(PNG + bytes(3_000_000)).decode()}"
    with pytest.raises(openai.APIStatusError, match="the limit is 1048576") as refused:
        client.chat.completions.create(model="echo", messages=chat(large))
    assert (refused.value.status_code, refused.value.code) == (413, "payload_too_large")
    with pytest.raises(openai.APIStatusError, match="more than 2097152 bytes without images") as refused:
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": " " * 2_100_000}])
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")
    with pytest.raises(openai.BadRequestError, match="not valid base64") as refused:
        client.chat.completions.create(model="echo", messages=chat("data:image/png;base64,*"))
    assert (refused.value.code, refused.value.param) == (
        "invalid_image",
        "messages.0.content.1.image_url.url",
    )


@pytest.mark.slow
def test_large_images_go_to_a_store(
    valkey_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_STORE_URL", f"file://{tmp_path}")
    urls = [
        f"data:image/png;base64,{base64.b64encode(PNG + bytes([n]) * 6_000_000).decode()}" for n in range(4)
    ]
    with (
        running_worker(worker_config(valkey_url, queue_name, model="echo", store_url=f"file://{tmp_path}")),
        gateway(valkey_url, queue_name) as served,
        OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        served.wait_for("echo")
        answer = client.chat.completions.create(model="echo", messages=chat(*urls), max_tokens=60)
    assert answer.choices[0].message.content == f"Is {'[image]' * 4}?\n"
