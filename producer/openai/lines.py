"""Request lines of OpenAI's Batch API, and the lines that answer them.

A line is `{"custom_id", "method": "POST", "url", "body"}`, its url /v1/chat/completions, /v1/completions or
/v1/embeddings. A request that succeeded is answered in the output file, any other in the error file; the files' order
is the input's. Format: the API's reference, "Batch".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.dataset.tables.rows import JsonLinesSource
from pagemill.producer.openai.formats import URLS, choice, completion, parse_job, read_job
from pagemill.producer.openai.pooled_formats import EMBEDDINGS_URL, write_pooled
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result, Usage

_KEPT = ("outputs", "usage", "model", "rows", "labels")
_FINAL_STATUS = 400
_STATUS = {"deadline_exceeded": 504, "unknown_model": 404, "unknown_adapter": 404, "payload_too_large": 413}


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
    """One line: the job it asks for, or the reason it is invalid."""

    number: int
    custom_id: str
    url: str
    job: Job | Failure

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

    `model`: replaces the lines' own, for files written for a model not served here. `deadline`: unix seconds.
    """

    def __init__(self, path: Path, model: str | None = None, deadline: float | None = None) -> None:
        self.model = model
        self.deadline = deadline
        self._source = JsonLinesSource(path)

    def check(self, *, max_requests: int | None = None, url: str | None = None) -> int:
        """Check the file before anything runs: like the API, refuse missing or repeated ids.

        `url`: the one that every line must have. Returns the number of requests. Raises RefusedFile.
        """
        seen: dict[bytes, int] = {}
        count = 0
        for row in self._source.rows():
            count += 1
            if max_requests is not None and count > max_requests:
                raise RefusedFile(f"more than {max_requests:,} requests", "too_many_requests", count)
            fields = row.fields
            if fields is None:
                message = row.error.message if row.error else "not an object"
                raise RefusedFile(message, "invalid_json_line", row.number)
            name = fields.get("custom_id")
            if not isinstance(name, str) or not name:
                raise RefusedFile("custom_id is missing", "missing_custom_id", row.number)
            if (first := seen.setdefault(name.encode(), row.number)) != row.number:
                reason = f"requests {first} and {row.number} have the same custom_id"
                raise RefusedFile(reason, "duplicate_custom_id", row.number)
            if url is not None and fields.get("url") != url:
                raise RefusedFile(f"the url is not the batch's endpoint, {url}", "mismatched_url", row.number)
        if not count:
            raise RefusedFile("the file holds no requests", "empty_file")
        return count

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
            job: Job | Failure
            try:
                job = job_of(row.fields, self.model, self.deadline)
            except InvalidJob as error:
                job = Failure(error.code, str(error))
            yield BatchRequest(row.number, row.fields["custom_id"], str(row.fields.get("url")), job)


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
        """Answer one request. `key` names its answer; `end` is the result as `success_line` wants it."""
        summary = self.summary
        summary.total += 1
        if isinstance(end, Failure):
            summary.failed += 1
            summary.codes[end.code] = summary.codes.get(end.code, 0) + 1
            self._errors.write(error_line(request.custom_id, end))
            return
        self._output.write(success_line(request.custom_id, request.url, key, end))
        summary.completed += 1
        summary.prompt_tokens += end["usage"]["prompt_tokens"]
        summary.completion_tokens += end["usage"]["completion_tokens"]
        summary.cached_tokens += end["usage"].get("cached_tokens", 0)


def job_of(line: Mapping[str, Any], model: str | None = None, deadline: float | None = None) -> Job:
    """Return the job that a request line asks for. Raises InvalidJob for an unsupported field."""
    url = line.get("url")
    if line.get("method") != "POST" or url not in URLS:
        raise InvalidJob(f"only POST to {' and '.join(URLS)} is supported", "unsupported_feature")
    fields = read_job(url, line.get("body"))
    if model is not None:
        fields["model"] = model
    if deadline is not None:
        fields["deadline"] = deadline
    return parse_job(fields)


def success_line(name: str, url: str, key: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's output line; `kept` is its result (`outputs` or `rows`, `usage`, `model`) and `created`."""
    if url == EMBEDDINGS_URL:
        result = Result.model_validate({name: kept[name] for name in _KEPT} | {"id": key})
        body = write_pooled(url, key[:24], kept["created"], {}, [result])
    else:
        body = completion(
            url,
            key[:24],
            created=kept["created"],
            model=kept["model"],
            choices=[choice(url, Output.model_validate(sample)) for sample in kept["outputs"]],
            usage=Usage.model_validate(kept["usage"]),
        )
    return {
        "id": f"batch_req_{key[:24]}",
        "custom_id": name,
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
