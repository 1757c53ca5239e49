"""A cascade's last model behind another API: the run itself sends requests, within a budget of tokens.

The maximum cost of a request is written to the journal before the request is sent, and later replaced by the actual
cost: a run does not exceed its budget even if it is killed. Jobs, the journal, logs and errors do not contain the key.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self
from urllib.parse import urlsplit

from pagemill.common.api_keys import is_key, read_key
from pagemill.common.backoff import Backoff
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result, Timing, Usage

PREFIX = "openai:"
KEY_VARIABLE = "PAGEMILL_API_KEY"
CONCURRENCY = 8
"""Maximum concurrent requests."""
ANSWER_S = 120.0
"""Maximum seconds of one request."""
MAX_ANSWER_BYTES = 1 << 20
MAX_TRIES = 6
"""Maximum requests for one row while the API temporarily does not accept them."""
MAX_WAIT_S = 30.0
_OVERHEAD_TOKENS = 64
"""Allowance for the API's additions to a request: its chat template, and its form of the schema."""
_TURN_TOKENS = 16
BUDGET_EXHAUSTED = "budget_exhausted"
"""The code of rows that exceeded the budget: they keep the answer of the previous stage."""
_SPENT = "api_tokens"
"""The journal's entry for used tokens, and those that requests without a response may have used."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of an API. `name`: as configured, `openai:https://host/v1/MODEL`."""

    name: str
    url: str
    model: str
    budget: int
    """Maximum tokens, of prompts and outputs together, that a run may use."""
    key_file: Path | None

    def key(self) -> str:
        """Return the key, empty if none is set. Raises DatasetError, whose message does not contain it."""
        if self.key_file is None:
            key = os.environ.get(KEY_VARIABLE, "")
            if key and not is_key(key):
                raise DatasetError(f"{KEY_VARIABLE} is not a key")
            return key
        try:
            return read_key(self.key_file)
        except ValueError as error:
            raise DatasetError(f"--api-key-file: {error}") from None


def is_remote(model: str) -> bool:
    return model.startswith(PREFIX)


def remote_model(
    models: Sequence[str], budget: int | None, key_file: str | Path | None
) -> RemoteModel | None:
    """Return the model of another API among those of a cascade's later stages. Raises DatasetError."""
    found = [model for model in models if is_remote(model)]
    if not found:
        if budget is not None or key_file is not None:
            raise DatasetError(f"--api-budget and --api-key-file are for --to {PREFIX}https://HOST/v1/MODEL")
        return None
    if found != [models[-1]]:
        raise DatasetError(f"only the last --to can be a model of another API ({PREFIX}...)")
    if budget is None or budget < 1:
        raise DatasetError(
            f"--to {PREFIX}... sends rows to another API, which may cost money: set --api-budget TOKENS"
        )
    url, model = _parts(found[0])
    made = RemoteModel(found[0], url, model, budget, None if key_file is None else Path(key_file))
    made.key()
    return made


def _parts(name: str) -> tuple[str, str]:
    """Return an API's address, up to `/v1` if it has such a part, and the model's name, which may contain slashes."""
    address = name.removeprefix(PREFIX)
    base, version, model = address.rpartition("/v1/")
    if not version:
        base, _, model = address.rpartition("/")
    try:
        parts = urlsplit(base)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not model or "@" in base:
        raise DatasetError(f"--to: a model of another API is {PREFIX}https://HOST/v1/MODEL")
    return base + version.rstrip("/"), model


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a row's work. `tokens`: the tokens used, out of the `reserved` ones."""

    name: str
    kept: dict[str, Any] | None
    failure: Failure | None
    tokens: int = 0
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    """The request for one row."""

    name: str
    body: dict[str, Any]
    choices: Mapping[str, str]
    """Maps the labels in the request to those of the row."""
    most_tokens: int


class Remote:
    """Requests the labels of rows on several threads. All methods must be called on the journal's thread."""

    def __init__(self, model: RemoteModel, journal: Journal) -> None:
        self.model = model
        self._key = model.key()
        self._journal = journal
        self._waiting: deque[_Request] = deque()
        self._done: list[Ended] = []
        self._running = 0
        self._asked: SimpleQueue[_Request | None] = SimpleQueue()
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._closing = threading.Event()
        self._over: Failure | None = None
        """Why no more requests are sent."""
        self._is_newer = False
        spent = journal.fact(_SPENT)
        self.spent = journal.tokens_of(model.name) if spent is None else int(spent)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Start no more requests; those in progress are abandoned."""
        self._closing.set()
        for _ in self._threads:
            self._asked.put(None)

    @property
    def in_flight(self) -> int:
        """Return the number of rows that have not been collected."""
        return len(self._waiting) + len(self._done) + self._running

    def send(self, jobs: Sequence[Job]) -> None:
        """Accept the work of rows; the caller limits their number."""
        for job in jobs:
            made = _request(self.model, job)
            if isinstance(made, Ended):
                self._done.append(made)
            else:
                self._waiting.append(made)
        self.start()

    def wait(self, seconds: float) -> None:
        """Wait for the end of a request."""
        if self._running and not self._done:
            with suppress(Empty):
                self._take(self._ended.get(timeout=seconds))

    def collect(self) -> list[Ended]:
        """Return ended work, to be recorded in the transaction around this call; call `start` afterwards."""
        with suppress(Empty):
            while True:
                self._take(self._ended.get_nowait())
        done, self._done = self._done, []
        self._book(sum(ended.tokens - ended.reserved for ended in done))
        return done

    def _take(self, ended: Ended) -> None:
        self._running -= 1
        self._done.append(ended)
        if ended.failure is not None and ended.failure.code == _DENIED:
            self._over = ended.failure

    def start(self) -> None:
        """Send the requests that the budget allows. It is used up if a row does not fit and no tokens can come back."""
        while self._waiting and self._running < CONCURRENCY:
            request = self._waiting[0]
            if self._over is None and self.spent + request.most_tokens > self.model.budget:
                if self._running or any(ended.reserved for ended in self._done):
                    return
                self._over = Failure(
                    BUDGET_EXHAUSTED,
                    f"{self.spent:,} tokens of --api-budget {self.model.budget:,} are used, "
                    f"and this row may take {request.most_tokens:,}",
                    retryable=True,
                )
            self._waiting.popleft()
            if self._over is not None:
                self._done.append(Ended(request.name, None, self._over))
                continue
            self._book(request.most_tokens)
            self._running += 1
            if len(self._threads) < self._running:
                self._threads.append(threading.Thread(target=self._work, name="pagemill-api", daemon=True))
                self._threads[-1].start()
            self._asked.put(request)

    def _book(self, tokens: int) -> None:
        """Count tokens before they are used, or uncount unused ones."""
        if not tokens:
            return
        self.spent += tokens
        self._journal.set_facts(**{_SPENT: str(self.spent)})

    def _work(self) -> None:
        while (request := self._asked.get()) is not None:
            began = time.monotonic()
            try:
                answer = self._answer_of(request)
                ended = _ended(request, self.model.name, answer, time.monotonic() - began)
            except _Failed as error:
                failure = Failure(error.code, str(error), retryable=True)
                ended = Ended(
                    request.name, None, failure, request.most_tokens * error.is_paid, request.most_tokens
                )
            self._ended.put(ended)

    def _answer_of(self, request: _Request) -> Any:
        """Return the response, after retries as needed. Raises _Failed."""
        backoff, is_newer = Backoff(0.5, MAX_WAIT_S), self._is_newer
        for left in reversed(range(MAX_TRIES)):
            try:
                return _post(self.model.url, self._key, _newer(request.body) if is_newer else request.body)
            except _Failed as error:
                if error.status == 400 and not is_newer:
                    is_newer = self._is_newer = True
                    continue
                if not error.is_passing or not left:
                    raise
                if self._closing.wait(min(MAX_WAIT_S, max(backoff.next(), error.retry_after_s))):
                    raise
        raise AssertionError("the last try returns or raises")


_DENIED = "api_denied"
_FAILED = "api_error"


class _Failed(Exception):
    """A request without a response. The message quotes neither the request nor the response."""

    def __init__(
        self, message: str, status: int = 0, *, is_paid: bool = False, retry_after_s: float = 0.0
    ) -> None:
        """`is_paid`: it may have used tokens; such a request is not repeated."""
        super().__init__(message)
        self.status = status
        self.is_paid = is_paid
        self.is_passing = not is_paid and status in (0, 408, 429, 503)
        self.retry_after_s = retry_after_s
        self.code = _DENIED if status in (401, 403, 404) else _FAILED


def _request(model: RemoteModel, job: Job) -> _Request | Ended:
    """Return the request of a job, in OpenAI's form of a chat, or its end if it cannot be one."""
    name = job.key or ""
    messages = job.messages or ()
    turns = [
        {"role": m.role, "content": m.text} | ({} if m.name is None else {"name": m.name}) for m in messages
    ]
    if job.messages is None and job.prompt is not None:
        turns = [{"role": "user", "content": job.prompt}]
    if not turns or not all(m.is_plain and not m.images for m in messages):
        return Ended(name, None, Failure(_FAILED, "only text is sent to another API"))
    shape = job.structured_outputs
    choices = {label.strip(): label for label in (shape.choice if shape is not None else None) or ()}
    longest = max((len(json.dumps({"label": label})) for label in choices), default=0)
    schema = {
        "type": "object",
        "properties": {"label": {"type": "string", "enum": list(choices)}},
        "required": ["label"],
        "additionalProperties": False,
    }
    max_tokens = longest + 16 if "max_tokens" not in job.model_fields_set else job.max_tokens or longest + 16
    body: dict[str, Any] = {
        "model": model.model,
        "messages": turns,
        "temperature": 0,
        "max_tokens": max_tokens,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": schema},
        },
    }
    # A token has at least one byte.
    most = len(json.dumps(body)) + _TURN_TOKENS * len(turns) + _OVERHEAD_TOKENS + max_tokens
    return _Request(name, body, choices, most)


def _newer(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request for models that reason, for which OpenAI's API requires another form."""
    changed = {name: value for name, value in body.items() if name not in ("max_tokens", "temperature")}
    return changed | {"max_completion_tokens": body["max_tokens"]}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _post(url: str, key: str, body: dict[str, Any]) -> Any:
    """Return the JSON of an API's response. Raises _Failed."""
    headers = {"content-type": "application/json", "user-agent": "pagemill"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    give_up = time.monotonic() + ANSWER_S
    try:
        with _opener.open(request, timeout=ANSWER_S) as answer:
            found = bytearray()
            while piece := answer.read1(65536):
                found += piece
                if len(found) > MAX_ANSWER_BYTES or time.monotonic() > give_up:
                    raise _Failed("the API's answer is too long", is_paid=True)
        return json.loads(found)
    except urllib.error.HTTPError as error:
        with error:
            pass
        wait = error.headers.get("retry-after", "")
        seconds = float(wait) if wait.isascii() and wait.isdigit() else 0.0
        raise _Failed(
            f"the API answers HTTP {error.code}",
            error.code,
            is_paid=error.code in (500, 502, 504),
            retry_after_s=seconds,
        ) from None
    except urllib.error.URLError as error:
        # There was no response; unless the connection failed, the API may still be processing the request.
        is_refused = isinstance(error.reason, ConnectionRefusedError)
        raise _Failed("the API cannot be reached", is_paid=not is_refused) from None
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        raise _Failed("the API's answer cannot be read", is_paid=True) from None


def _ended(request: _Request, model: str, answer: Any, seconds: float) -> Ended:
    """Return the end according to a response; all reserved tokens count as used if it does not report them."""
    prompt, completion = _count(answer, "prompt_tokens"), _count(answer, "completion_tokens")
    tokens = request.most_tokens if prompt is None or completion is None else prompt + completion
    label = request.choices.get(_label(answer))
    if label is None:
        failure = Failure("no_label", "the API's response is not one of the labels")
        return Ended(request.name, None, failure, tokens, request.most_tokens)
    result = Result(
        id=request.name,
        outputs=(Output(index=0, text=label, finish_reason="stop", label=label),),
        usage=Usage(prompt_tokens=prompt or 0, completion_tokens=completion or 0),
        model=model,
        timing=Timing(queue_s=0.0, e2e_s=seconds),
    )
    kept = result.model_dump(exclude={"id", "metadata", "fingerprint"}) | {"created": int(time.time())}
    return Ended(request.name, kept, None, tokens, request.most_tokens)


def _count(answer: Any, name: str) -> int | None:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value < 2**31 else None


def _label(answer: Any) -> str:
    """Return the label in a response: in JSON, or the complete text if the API ignores the schema."""
    try:
        text = answer["choices"][0]["message"]["content"].strip()
    except (KeyError, IndexError, TypeError, AttributeError):
        return ""
    try:
        label = json.loads(text)["label"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return str(text)
    return label.strip() if isinstance(label, str) else ""
