"""Requests for vectors, labels and scores, converted to jobs, and their responses.

/v1/embeddings is OpenAI's; /v1/rerank accepts Cohere's and Jina's form (/v2/rerank is Cohere's newer path for the
same), /v1/score and /v1/classify are vLLM's. Unsupported fields fail with an error that names them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.producer.openai.pooled_schemas import (
    CLASSIFY_URL,
    EMBEDDINGS_URL,
    POOLED_OPERATIONS,
    RERANK_URLS,
    SCORE_URL,
)
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_INPUTS
from pagemill.producer.wire.schema.outputs import Result, Rows

POOLED_URLS = tuple(POOLED_OPERATIONS)
_OF_A_JOB = ("model", "truncate", "dimensions", "prompt_name")
_MAX_PAIRED = 128
"""Maximum texts of text_1, if it is a list: each is a job."""


def read_pooled(url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the jobs' fields. Raises InvalidJob; `Job.parse` checks the values of a job's own fields."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - POOLED_OPERATIONS[url][0].model_fields.keys():
        raise InvalidJob(f"parameter {name[:64]} is not supported", "unsupported_feature", name[:64])
    if not isinstance(given.pop("user", ""), str):
        raise InvalidJob("user: Input should be a valid string", param="user")
    fields: dict[str, Any] = {name: given[name] for name in _OF_A_JOB if name in given}
    if url == EMBEDDINGS_URL:
        encoding_of(given)
        return [{"task": "embed", **fields, "inputs": _inputs(given)}]
    if url == CLASSIFY_URL:
        return [{"task": "classify", **fields, "inputs": _inputs(given)}]
    if url == SCORE_URL:
        return [{"task": "rerank", **fields, **pair} for pair in _pairs(given)]
    _top_n(given), _returns_documents(given)
    query = _text(given.get("query"), "query")
    return [{"task": "rerank", **fields, "prompt": query, "documents": documents_of(given)}]


def write_pooled(
    url: str, name: str, created: int, body: Mapping[str, Any], results: Sequence[Result]
) -> dict[str, Any]:
    """Return the response to a request; `body`: the request's, for its settings of the response."""
    tokens = sum(result.usage.prompt_tokens for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    first = results[0]
    if url == EMBEDDINGS_URL:
        data = _embeddings(first, encoding_of(body))
        return {"object": "list", "data": data, "model": first.model, "usage": usage}
    if url in RERANK_URLS:
        billed = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}}
        ranked = _ranked(first, body)
        return {
            "id": f"rerank-{name}",
            "model": first.model,
            "results": ranked,
            "usage": usage,
            "meta": billed,
        }
    listed = {"object": "list", "created": created, "model": first.model, "usage": usage}
    if url == SCORE_URL:
        scores = [score for result in results for score in result.scores]
        rows = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {"id": f"score-{name}", **listed, "data": rows}
    return {
        "id": f"classify-{name}",
        **listed,
        "data": [_label(i, row) for i, row in enumerate(first.classes)],
    }


def encoding_of(body: Mapping[str, Any]) -> str:
    """Return the encoding of vectors: float or base64. Raises InvalidJob."""
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise InvalidJob("encoding_format is float or base64", param="encoding_format")
    return str(encoding)


def documents_of(body: Mapping[str, Any]) -> list[str]:
    """Return the texts of `documents`: strings, or objects with a text. Raises InvalidJob."""
    documents = body.get("documents")
    if not isinstance(documents, list) or not 0 < len(documents) <= MAX_INPUTS:
        raise InvalidJob(f"documents is a list of 1 to {MAX_INPUTS} texts", param="documents")
    texts = [document.get("text") if isinstance(document, Mapping) else document for document in documents]
    return [_text(text, f"documents.{number}") for number, text in enumerate(texts)]


def _inputs(body: Mapping[str, Any]) -> list[Any]:
    """Read a text, a list of texts, a list of token ids, or a list of such lists."""
    given = body.get("input")
    if isinstance(given, str) or (
        isinstance(given, list) and given and all(type(item) is int for item in given)
    ):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(item, str | list) for item in given):
        raise InvalidJob("input is a text, token ids, or a list of either", param="input")
    if len(given) > MAX_INPUTS:
        raise InvalidJob(f"at most {MAX_INPUTS} inputs", param="input")
    for number, item in enumerate(given):
        if not item:
            raise InvalidJob(f"input.{number} is empty", param="input")
        if isinstance(item, list) and not all(type(token) is int for token in item):
            raise InvalidJob(f"input.{number}: token ids are integers", param="input")
    return given


def _pairs(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read pairs of one text with one or several, or of two lists of equal length."""
    if body.get("encoding_format") not in (None, "float"):
        raise InvalidJob("encoding_format is float", "unsupported_feature", "encoding_format")
    firsts, seconds = _texts(body, "text_1"), _texts(body, "text_2")
    if len(firsts) == 1:
        return [{"prompt": firsts[0], "documents": seconds}]
    if len(firsts) != len(seconds) or len(firsts) > _MAX_PAIRED:
        raise InvalidJob(
            f"text_1 is one text, or a list as long as text_2 of at most {_MAX_PAIRED}", param="text_1"
        )
    return [{"prompt": first, "documents": [second]} for first, second in zip(firsts, seconds, strict=True)]


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    given = body.get(name)
    if isinstance(given, str):
        return [_text(given, name)]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_INPUTS:
        raise InvalidJob(f"{name} is a text, or a list of 1 to {MAX_INPUTS}", param=name)
    return [_text(text, name) for text in given]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidJob(f"{name} is a text that is not empty", param=name.partition(".")[0])
    return value


def _top_n(body: Mapping[str, Any]) -> int | None:
    most = body.get("top_n")
    if most is not None and (type(most) is not int or most < 1):
        raise InvalidJob("top_n is a number from 1 on", param="top_n")
    return most


def _returns_documents(body: Mapping[str, Any]) -> bool:
    returned = body.get("return_documents")
    if returned is not None and not isinstance(returned, bool):
        raise InvalidJob("return_documents: Input should be a valid boolean", param="return_documents")
    return bool(returned)


def _embeddings(result: Result, encoding: str) -> list[dict[str, Any]]:
    vectors: list[Any] = result.embeddings
    if encoding == "base64":
        assert result.rows is not None
        vectors = [base64.b64encode(row).decode() for row in _raw_rows(result.rows)]
    return [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]


def _raw_rows(rows: Rows) -> list[bytes]:
    """Return each row's float32 values as bytes."""
    assert rows.dtype == "float32", "the jobs asked for float32"
    size = 4 * rows.shape[1]
    return [rows.raw[size * row : size * (row + 1)] for row in range(rows.shape[0])]


def _ranked(result: Result, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    best_first = sorted(enumerate(result.scores), key=lambda scored: -scored[1])[: _top_n(body)]
    documents = documents_of(body) if _returns_documents(body) else None
    return [
        {"index": index, "relevance_score": score}
        | ({} if documents is None else {"document": {"text": documents[index]}})
        for index, score in best_first
    ]


def _label(index: int, probabilities: Mapping[str, float]) -> dict[str, Any]:
    label = max(probabilities, key=lambda name: probabilities[name])
    return {
        "index": index,
        "label": label,
        "probs": list(probabilities.values()),
        "num_classes": len(probabilities),
        "scores": dict(probabilities),
    }
