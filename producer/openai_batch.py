"""Batch files of OpenAI's Batch API: a file written for it runs here unchanged, and so does what reads its output.

A line is `{"custom_id", "method": "POST", "url", "body"}`, its url /v1/chat/completions or /v1/completions. The
output has a line per request that succeeded, the error file one per request that did not; the files' order is
the input's. Formats: the API's reference, "Batch" and "Chat completions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from producer.client import Producer
from producer.dataset.journal import Failure, Journal
from producer.dataset.recipe import is_deterministic
from producer.dataset.rows import DatasetError, JsonLinesSource, Row, RowError
from producer.dataset.work import WINDOW, Tally, Work, WorkLoop
from producer.dataset.writers import check_output, replacing
from producer.wire.errors import InvalidJob
from producer.wire.protocol import Job

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETIONS_URL)

_RENAMED = {"max_completion_tokens": "max_tokens"}
_IGNORED = frozenset(
    {"user", "store", "service_tier", "stream", "stream_options", "metadata", "safety_identifier"}
)
"""Fields that change nothing about the output; a batch is never streamed."""
_FINAL_STATUS = 400
_STATUS = {"deadline_exceeded": 504, "unknown_model": 404, "payload_too_large": 413}


@dataclass
class BatchSummary:
    """The batch's counts: total = completed + failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    codes: dict[str, int] = field(default_factory=dict)


@dataclass
class BatchFile:
    """One batch file. `model`: used instead of the lines' own, for files written for a model that is not here."""

    path: Path
    out: Path
    model: str | None = None
    window: int = WINDOW
    deadline: float | None = None
    """Unix seconds; what has not ended by then is expired, what has is delivered."""

    def __post_init__(self) -> None:
        self._source = JsonLinesSource(self.path)

    @property
    def errors_path(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.errors.jsonl")

    @property
    def journal_path(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    def check(self) -> int:
        """Refuse the file as a whole before anything runs: as the API does, for ids that are missing or repeated.

        Returns the number of requests. Raises DatasetError.
        """
        check_output(self.out)
        seen: dict[bytes, int] = {}
        count = 0
        for row in self._source.rows():
            count += 1
            name = (row.fields or {}).get("custom_id")
            if row.fields is None:
                message = row.error.message if row.error else "not an object"
                raise DatasetError(f"{self.path}, request {row.number}: {message}")
            if not isinstance(name, str) or not name:
                raise DatasetError(f"{self.path}, request {row.number}: custom_id is missing")
            if (first := seen.setdefault(name.encode(), row.number)) != row.number:
                raise DatasetError(f"{self.path}: requests {first} and {row.number} have the same custom_id")
        if not count:
            raise DatasetError(f"{self.path} holds no requests")
        return count

    def models(self) -> set[str]:
        """The models that the lines name."""
        bodies = ((row.fields or {}).get("body") for row in self._source.rows())
        names = (body.get("model") for body in bodies if isinstance(body, Mapping))
        return {self.model} if self.model is not None else {name for name in names if isinstance(name, str)}

    def execute(
        self, producer: Producer, on_news: Callable[[Tally], None] = lambda tally: None
    ) -> BatchSummary:
        """Run to the end and write both files. Call it again after any interruption."""
        self.check()
        with Journal(self.journal_path) as journal:
            journal.forget_retryable()
            WorkLoop(producer, journal, window=self.window, on_news=on_news).run(lambda: self._works(journal))
            return self._finish(journal)

    def cancel(self, producer: Producer) -> int:
        """Cancel what an earlier start has under way; `deliver` then writes what had finished."""
        with Journal(self.journal_path) as journal:
            return WorkLoop(producer, journal).cancel()

    def deliver(self, producer: Producer) -> BatchSummary:
        """Collect what has ended and write both files, without submitting anything."""
        self.check()
        with Journal(self.journal_path) as journal:
            WorkLoop(producer, journal).run(lambda: iter(()))
            return self._finish(journal)

    def _requests(self) -> Iterator[tuple[Row, str, Job | RowError]]:
        for row in self._source.rows():
            assert row.fields is not None
            try:
                yield row, row.fields["url"], job_of(row.fields, self.model, self.deadline)
            except InvalidJob as error:
                yield row, str(row.fields.get("url")), RowError(error.code, str(error))

    def _works(self, journal: Journal) -> Iterator[Work]:
        for row, _, job in self._requests():
            if isinstance(job, Job):
                yield Work(_work_key(row, job), job)

    def _finish(self, journal: Journal) -> BatchSummary:
        summary = BatchSummary()
        with replacing(self.errors_path) as errors, replacing(self.out) as output:
            for row, url, job in self._requests():
                assert row.fields is not None
                name, summary.total = row.fields["custom_id"], summary.total + 1
                if isinstance(job, RowError):
                    failure = Failure(job.code, job.message)
                else:
                    key = _work_key(row, job)
                    if (kept := journal.output(key)) is not None:
                        output.write(success_line(name, url, key, job, kept))
                        summary.completed += 1
                        summary.prompt_tokens += kept["usage"]["prompt_tokens"]
                        summary.completion_tokens += kept["usage"]["completion_tokens"]
                        continue
                    failure = journal.failure(key) or Failure("worker_lost", "it has not ended", True)
                summary.failed += 1
                summary.codes[failure.code] = summary.codes.get(failure.code, 0) + 1
                errors.write(error_line(name, failure))
        journal.remove()
        return summary


def job_of(line: Mapping[str, Any], model: str | None = None, deadline: float | None = None) -> Job:
    """The job that a request line asks for. Raises InvalidJob for a field that is not supported."""
    url, body = line.get("url"), line.get("body")
    if line.get("method") != "POST" or url not in URLS:
        raise InvalidJob(f"only POST to {' and '.join(URLS)} is supported", "unsupported_feature")
    if not isinstance(body, Mapping):
        raise InvalidJob("body must be an object")
    fields = {
        _RENAMED.get(str(name), str(name)): value
        for name, value in body.items()
        if name not in _IGNORED and value is not None
    }
    if url == CHAT_URL:
        fields = _chat_fields(fields)
    if model is not None:
        fields["model"] = model
    if deadline is not None:
        fields["deadline"] = deadline
    return Job.parse(fields)


def success_line(name: str, url: str, key: str, job: Job, kept: dict[str, Any]) -> dict[str, Any]:
    """The output line of one request; `kept` is its result as the journal keeps it."""
    is_chat = url == CHAT_URL
    prefix = "chatcmpl" if is_chat else "cmpl"
    usage = kept["usage"]
    choices = [_chat_choice(s) if is_chat else _text_choice(s) for s in kept["outputs"]]
    body = {
        "id": f"{prefix}-{key[:24]}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": kept["created"],
        "model": kept["model"],
        "choices": choices,
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0)},
        },
    }
    return {
        "id": f"batch_req_{key[:24]}",
        "custom_id": name,
        "response": {"status_code": 200, "request_id": f"req_{key[:24]}", "body": body},
        "error": None,
    }


def error_line(name: str, failure: Failure) -> dict[str, Any]:
    """The error file's line of one request."""
    codes = {"deadline_exceeded": "batch_expired", "cancelled": "batch_cancelled"}
    if failure.code in codes:
        error = {"code": codes[failure.code], "message": failure.message}
        return {"id": f"batch_req_{name}", "custom_id": name, "response": None, "error": error}
    status = _STATUS.get(failure.code, 500 if failure.retryable else _FINAL_STATUS)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": failure.message, "type": kind, "param": None, "code": failure.code}}
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": None}


def _chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Chat's own spellings: `logprobs: true` with `top_logprobs`, and content in parts."""
    wants_logprobs, top = fields.pop("logprobs", False), fields.pop("top_logprobs", 0)
    if wants_logprobs is True:
        fields["logprobs"] = top
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_plain_message(message) for message in messages]
    return fields


def _plain_message(message: Any) -> Any:
    """Text parts joined; anything that is not text is refused."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts
    ):
        raise InvalidJob("only text content is supported", "unsupported_feature")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _chat_choice(sample: dict[str, Any]) -> dict[str, Any]:
    content = None
    if sample.get("logprobs") is not None:
        content = [
            {**_token(p["chosen"]), "top_logprobs": [_token(t) for t in p["top"]]} for p in sample["logprobs"]
        ]
    return {
        "index": sample["index"],
        "message": {"role": "assistant", "content": sample["text"], "refusal": None},
        "logprobs": None if content is None else {"content": content, "refusal": None},
        "finish_reason": sample["finish_reason"],
    }


def _text_choice(sample: dict[str, Any]) -> dict[str, Any]:
    logprobs = None
    if sample.get("logprobs") is not None:
        chosen = [position["chosen"] for position in sample["logprobs"]]
        logprobs = {
            "tokens": [token["text"] for token in chosen],
            "token_logprobs": [token["logprob"] for token in chosen],
            "top_logprobs": [{t["text"]: t["logprob"] for t in p["top"]} for p in sample["logprobs"]],
            "text_offset": _offsets([token["text"] for token in chosen]),
        }
    return {
        "index": sample["index"],
        "text": sample["text"],
        "logprobs": logprobs,
        "finish_reason": sample["finish_reason"],
    }


def _offsets(texts: list[str]) -> list[int]:
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return offsets


def _token(token: dict[str, Any]) -> dict[str, Any]:
    # OpenAI's field is a number always; a token that was forced is certain.
    logprob = 0.0 if token["logprob"] is None else token["logprob"]
    return {"token": token["text"], "bytes": list(token["text"].encode()), "logprob": logprob}


def _work_key(row: Row, job: Job) -> str:
    """Equal deterministic requests share a run; others are told apart by their custom_id."""
    assert row.fields is not None
    digest = job.digest()
    return digest if is_deterministic(job) else f"{digest}-{row.fields['custom_id']}"
