"""Request lines of OpenAI's Batch API, and their response lines.

A line is `{"custom_id", "method": "POST", "url", "body"}`, its url /v1/chat/completions, /v1/completions,
/v1/embeddings, /v1/rerank, /v1/score, /v1/classify or /v1/responses. The response to a request that succeeded is in the
output file, otherwise it is in the error file. Format: the API's reference, "Batch".
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.dataset.tables.rows import JsonLinesSource, Row
from pagemill.producer.dataset.tables.values import number_of
from pagemill.producer.openai.formats import CHAT_URL, Url, choices, completion, parse_job, read_job
from pagemill.producer.openai.pooled_formats import POOLED_URLS, write_pooled
from pagemill.producer.openai.responses import RESPONSES_URL, read_response, response
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Result

LineUrl = Url | Literal["/v1/responses"]
LINE_URLS: tuple[str, ...] = (*get_args(Url), RESPONSES_URL)
_NOT_IN_LINES = ("background", "store", "previous_response_id")
_KEPT = ("outputs", "prompt_logprobs", "usage", "model", "rows", "labels")
_FINAL_STATUS = 400
_STATUS = {
    "deadline_exceeded": 504,
    "model_not_allowed": 403,
    "model_not_found": 404,
    "unknown_model": 404,
    "unknown_adapter": 404,
    "payload_too_large": 413,
    "schema_mismatch": 500,
}


@dataclass
class BatchSummary:
    """The batch's counts: total = completed + failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    codes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line: the requested job, or the reason why it is invalid."""

    number: int
    custom_id: str
    url: str
    job: Job | Failure
    body: Mapping[str, Any] = field(default_factory=dict)

    def work_key(self) -> str:
        """Return a key that equal deterministic requests share; others are distinguished by custom_id."""
        assert isinstance(self.job, Job)
        digest = self.job.digest()
        return digest if self.job.is_repeatable else f"{digest}-{self.custom_id}"


class RefusedFile(DatasetError):
    """The file as a whole is not a valid batch. `line` is the offending line, if there is one."""

    def __init__(self, reason: str, code: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.line = line


class BatchRequests:
    """The requests of one file, read again by each iteration.

    `model`: replaces the lines' models, for files written for a model not served here. `deadline`: unix seconds.
    """

    def __init__(self, path: Path, model: str | None = None, deadline: float | None = None) -> None:
        self.model = model
        self.deadline = deadline
        self._path = path
        self._source = JsonLinesSource(path, remedy="convert the file to UTF-8")

    def check(self, *, max_requests: int | None = None, url: str | None = None) -> int:
        """Check the file before anything runs: like the API, reject missing or repeated ids.

        `url`: the required URL of every line. Returns the number of requests. Raises RefusedFile.
        """
        seen: dict[bytes, int] = {}
        count = 0
        for row in self._rows():
            count += 1
            if max_requests is not None and count > max_requests:
                raise RefusedFile(f"more than {max_requests:,} requests", "too_many_requests", count)
            fields = row.fields
            if fields is None:
                message = row.error.message if row.error else "not an object"
                raise RefusedFile(message, "invalid_json_line", row.number)
            name = fields.get("custom_id")
            if name is None or name == "":
                raise RefusedFile("custom_id is missing", "missing_custom_id", row.number)
            if not isinstance(name, str):
                shown = f'; write "{name}"' if isinstance(name, int) else ""
                raise RefusedFile(f"custom_id is not text{shown}", "invalid_custom_id", row.number)
            if (first := seen.setdefault(name.encode(), row.number)) != row.number:
                reason = f"requests {first} and {row.number} have the same custom_id"
                raise RefusedFile(reason, "duplicate_custom_id", row.number)
            if url is not None and url_of(fields) != url:
                raise RefusedFile(f"the url is not the batch's endpoint, {url}", "mismatched_url", row.number)
        if not count:
            raise RefusedFile("the file holds no requests", "empty_file")
        return count

    def _rows(self) -> Iterator[Row]:
        """Yield the lines. Raises RefusedFile if they are not JSON lines, without the file's path."""
        try:
            yield from self._source.rows()
        except DatasetError as error:
            reason = str(error).removeprefix(self._source.name)
            raise RefusedFile(f"the file{reason}", "invalid_json_line", 1) from None

    def models(self) -> set[str]:
        """Return the models that the lines name."""
        if self.model is not None:
            return {self.model}
        bodies = ((row.fields or {}).get("body") for row in self._source.rows())
        names = (body.get("model") for body in bodies if isinstance(body, Mapping))
        return {name for name in names if isinstance(name, str)}

    def __iter__(self) -> Iterator[BatchRequest]:
        for row in self._source.rows():
            assert row.fields is not None, "the file was checked"
            yield self._request(row.number, row.fields)

    def places(self) -> array[int]:
        """Return the byte at which each request's line starts, for `at`."""
        found = array("q")
        with self._path.open("rb") as file:
            start = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
            file.seek(start)
            for line in file:
                if line.strip():
                    found.append(start)
                start += len(line)
        return found

    def at(self, place: int, number: int) -> BatchRequest:
        """Return the request `number`, whose line starts at the byte `place`."""
        with self._path.open("rb") as file:
            file.seek(place)
            return self._request(number, json.loads(file.readline(), parse_float=number_of))

    def _request(self, number: int, fields: Mapping[str, Any]) -> BatchRequest:
        job: Job | Failure
        try:
            job = job_of(fields, self.model, self.deadline)
        except InvalidJob as error:
            job = Failure(error.code, str(error))
        url, body = url_of(fields), fields.get("body")
        asked = body if isinstance(body, Mapping) else {}
        return BatchRequest(number, fields["custom_id"], url, job, asked)


class LineWriter(Protocol):
    """A destination for lines."""

    def write(self, line: dict[str, Any], /) -> None: ...


class BatchAnswers:
    """Writes the lines of both files and sums their counts and usage."""

    def __init__(self, output: LineWriter, errors: LineWriter) -> None:
        self.summary = BatchSummary()
        self._output = output
        self._errors = errors

    def add(self, request: BatchRequest, key: str, end: Mapping[str, Any] | Failure) -> None:
        """Add the response to one request. `key` is its name; `end` is the result in the form of `success_line`."""
        summary = self.summary
        summary.total += 1
        if isinstance(end, Failure):
            summary.failed += 1
            summary.codes[end.code] = summary.codes.get(end.code, 0) + 1
            self._errors.write(error_line(request.custom_id, end))
            return
        self._output.write(success_line(request, key, end))
        summary.completed += 1
        summary.prompt_tokens += end["usage"]["prompt_tokens"]
        summary.completion_tokens += end["usage"]["completion_tokens"]
        summary.cached_tokens += end["usage"].get("cached_tokens", 0)


def job_of(line: Mapping[str, Any], model: str | None = None, deadline: float | None = None) -> Job:
    """Return the job that a request line describes. Raises InvalidJob for an unsupported field."""
    url = url_of(line)
    if str(line.get("method")).upper() != "POST" or url not in LINE_URLS:
        raise InvalidJob(f"only POST to {' and '.join(LINE_URLS)} is supported", "unsupported_feature")
    fields = _response_job(line.get("body")) if url == RESPONSES_URL else read_job(url, line.get("body"))
    if model is not None:
        fields["model"] = model
    if deadline is not None:
        fields["deadline"] = deadline
    return parse_job(fields)


def url_of(line: Mapping[str, Any]) -> str:
    """Return a request line's URL; for files for Azure OpenAI, which omit `/v1`, OpenAI's."""
    url = str(line.get("url"))
    return f"/v1{url}" if f"/v1{url}" in LINE_URLS else url


def _response_job(body: Any) -> dict[str, Any]:
    """Return the fields of the job of a line for /v1/responses. Raises InvalidJob."""
    if not isinstance(body, Mapping):
        raise InvalidJob("body must be an object", param="body")
    for name in _NOT_IN_LINES:
        if body.get(name):
            raise InvalidJob(f"{name} is not supported in a batch", "unsupported_feature", name)
    return read_job(CHAT_URL, read_response(body))


def success_line(request: BatchRequest, key: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's output line; `kept` is its result (`outputs` or `rows`, `usage`, `model`) and `created`."""
    url, job = request.url, request.job
    assert isinstance(job, Job)
    result = Result.model_validate({name: kept[name] for name in _KEPT if name in kept} | {"id": key})
    if url in POOLED_URLS:
        body = write_pooled(url, key[:24], kept["created"], request.body, [result])
    elif url == RESPONSES_URL:
        body = response(request.body, key[:24], kept["created"], result, completed=kept["created"])
    else:
        body = completion(
            url,
            key[:24],
            created=kept["created"],
            model=result.model,
            choices=choices(url, result, job.prompt),
            usage=result.usage,
        )
    return {
        "id": f"batch_req_{key[:24]}",
        "custom_id": request.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{key[:24]}", "body": body},
        "error": None,
    }


def error_line(name: str, failure: Failure) -> dict[str, Any]:
    """Return the error file's line of one request."""
    codes = {"deadline_exceeded": "batch_expired", "cancelled": "batch_cancelled"}
    if failure.code in codes:
        error = {"code": codes[failure.code], "message": failure.message}
        return {"id": f"batch_req_{name}", "custom_id": name, "response": None, "error": error}
    status = _STATUS.get(failure.code, 500 if failure.retryable else _FINAL_STATUS)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": failure.message, "type": kind, "param": None, "code": failure.code}}
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": None}
