"""A choice's probabilities over HTTP: Pagemill's fields next to OpenAI's, which OpenAI's client keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import running_worker, worker_config

LABELS = ["good", "bad"]
ASKED = {"structured_outputs": {"choice": LABELS}, "label_probs": "product"}


@pytest.fixture(scope="module")
def served(valkey_url: str, queue: str) -> Iterator[Served]:
    with running_worker(worker_config(valkey_url, queue, model="echo")), gateway(valkey_url, queue) as served:
        yield served


def chat(client: OpenAI, extra: dict[str, Any], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "bad or good?"}]
    return client.chat.completions.create(model="echo", messages=messages, extra_body=extra, **more)


def test_a_chat_has_them_beside_its_message(client: OpenAI) -> None:
    answer = chat(client, ASKED)
    (choice,) = answer.choices
    assert choice.message.content == choice.label == "bad"
    assert list(choice.label_probs) == LABELS
    assert sum(choice.label_probs.values()) == pytest.approx(1.0)
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len("bad")


def test_a_completion_has_them_beside_its_text(client: OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="bad or good?", extra_body=ASKED)
    choice: Any = answer.choices[0]
    assert (choice.text, choice.label, choice.finish_reason) == ("bad", "bad", "stop")
    assert sum(choice.label_probs.values()) == pytest.approx(1.0)


def test_other_answers_have_none(client: OpenAI) -> None:
    (choice,) = chat(client, {"structured_outputs": {"choice": LABELS}}).choices
    assert not hasattr(choice, "label_probs")


@pytest.mark.parametrize("extra", [{"label_probs": "product"}, ASKED | {"label_probs": 1}])
def test_nonsense_is_a_bad_request(client: OpenAI, extra: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="label_probs"):
        chat(client, extra)


@pytest.mark.slow
def test_a_stream_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="label_probs"):
        list(chat(client, ASKED, stream=True))
