"""Errors of the queue as OpenAI's clients recognize them."""

from __future__ import annotations

import pytest

from pagemill.producer.gateway.errors import as_api_error, error_body
from pagemill.producer.wire.schema.errors import InvalidJob, JobFailed, PagemillError


@pytest.mark.parametrize(
    "error",
    [
        InvalidJob("has 9 tokens", "prompt_too_long"),
        JobFailed("has 9 tokens", "prompt_too_long"),
    ],
)
def test_a_prompt_longer_than_the_context(error: PagemillError) -> None:
    told = as_api_error(error)
    assert (told.status, told.code) == (400, "context_length_exceeded")
    assert "maximum context length" in told.message
    assert "has 9 tokens" in told.message
    body = error_body("prompt_too_long", "has 9 tokens")
    assert body == {"code": told.code, "message": body["message"]}
    assert "maximum context length" in body["message"]


def test_other_errors_keep_their_words() -> None:
    told = as_api_error(InvalidJob("no", "schema_invalid"))
    assert (told.code, told.message) == ("schema_invalid", "no")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "the model gives vectors and does not accept rerank jobs: submit with task embed",
            "the model gives vectors: use /v1/embeddings",
        ),
        (
            "the model scores pairs of texts and does not accept embed jobs: submit with task rerank or classify",
            "the model scores pairs of texts: use /v1/rerank or /v1/score or /v1/classify",
        ),
        (
            "the model generates text and does not accept embed, classify or rerank jobs: submit with task generate "
            "or score, or start a worker with another",
            "the model generates text: use /v1/chat/completions or /v1/completions, or start a worker with another",
        ),
    ],
)
def test_another_task_is_named_by_its_address(message: str, expected: str) -> None:
    told = as_api_error(JobFailed(message, "unsupported_feature"))
    assert (told.code, told.message) == ("unsupported_feature", expected)
