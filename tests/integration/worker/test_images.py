"""Jobs with images through a real server and a worker: the echo model repeats a word for each."""

from __future__ import annotations

import base64

import pytest

from pagemill import Producer
from tests.worker.harness import running_worker, worker_config

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.mark.slow
def test_echo_shows_a_word_for_an_image(valkey_url: str, queue_name: str, engine_host: str) -> None:
    parts = [
        {"type": "text", "text": "Is "},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": " a cat?"},
    ]
    with (
        running_worker(worker_config(valkey_url, queue_name)),
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        handles = [
            producer.submit(messages=[{"role": "user", "content": parts}]),
            producer.submit(messages=[{"role": "user", "content": parts}], separate_reasoning=True),
            producer.submit(prompt="A cat?", images=[PNG, PNG]),
        ]
        assert [handle.result(timeout=60).text for handle in handles] == [
            "Is [image] a cat?\n",
            "Is [image] a cat?\n",
            "[image][image]A cat?\n",
        ]
