"""Every field of OpenAI's requests, as its client declares them, is used or rejected with its name."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from pagemill.producer.openai.formats import CHAT_URL, COMPLETIONS_URL, HINTS
from pagemill.producer.openai.lines import job_of
from pagemill.producer.openai.pooled_schemas import EMBEDDINGS_URL
from pagemill.producer.openai.responses import RESPONSES_URL
from pagemill.producer.wire.schema.errors import InvalidJob

REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    CHAT_URL: (
        chat_create_params.CompletionCreateParamsNonStreaming,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    COMPLETIONS_URL: (completion_create_params.CompletionCreateParamsNonStreaming, {"prompt": "x"}),
    EMBEDDINGS_URL: (embedding_create_params.EmbeddingCreateParams, {"input": "x"}),
    RESPONSES_URL: (response_create_params.ResponseCreateParamsNonStreaming, {"input": "x"}),
}
OF_STREAMS = {"stream", "stream_options"}
"""A batch's lines are not streamed; requests of the gateway are tested in tests/producer/gateway."""
FIELDS = [
    pytest.param(url, name, id=f"{url}-{name}")
    for url, (kind, _) in REQUESTS.items()
    for name in get_type_hints(kind)
    if name not in OF_STREAMS
]


def read(url: str, **fields: Any) -> None:
    line = {"method": "POST", "url": url, "body": {"model": "m"} | REQUESTS[url][1] | fields}
    job_of(line)


@pytest.mark.parametrize(("url", "name"), FIELDS)
def test_a_field_is_never_ignored(url: str, name: str) -> None:
    """No field can be this object: a used field rejects its value, and any other field is rejected itself."""
    with pytest.raises(InvalidJob) as caught:
        read(url, **{name: 7 if name in HINTS else {"no member of it": 1}})
    wire_names = {
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "input": "messages",
    }
    told = f"{caught.value.param} {caught.value}"
    assert name in told or wire_names.get(name, name) in told


@pytest.mark.parametrize(("url", "name"), FIELDS)
def test_null_is_as_good_as_nothing(url: str, name: str) -> None:
    if name not in ("model", "messages", "prompt", "input"):
        read(url, **{name: None})


def test_the_client_declares_what_is_tested() -> None:
    assert {"temperature", "tools", "reasoning_effort"} <= set(get_type_hints(REQUESTS[CHAT_URL][0]))
    assert len(FIELDS) > 80
