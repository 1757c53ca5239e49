"""Plays the cases of docs/conformance with the Python producer, and compares its commands and return values."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import (
    IdempotencyConflict,
    JobCancelled,
    JobFailed,
    JobNotFound,
    PagemillError,
)
from pagemill.producer.wire.schema.outputs import Result
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import SyncTransport

AT_WILL = {"ends", "sweep", "stats", "workers"}
"""Scripts that a client may call at any time."""
ERRORS = {
    IdempotencyConflict: "conflict", JobNotFound: "not_found", JobCancelled: "cancelled", JobFailed: "failed",
}  # fmt: skip


def fits(pattern: Any, value: Any) -> bool:
    """Return True if a value matches the expectation of a case; see docs/conformance/README.md."""
    match pattern:
        case {"json": inner, **more}:
            read = json.loads(value)
            optional = {name: one for name, one in more.get("optional", {}).items() if name in read}
            return fits(inner | optional, read) and set(inner | optional) == set(read)
        case {"match": expression}:
            return re.fullmatch(expression, str(value)) is not None
        case {"any": "number"}:
            return isinstance(value, int | float)
        case dict():
            return isinstance(value, dict) and all(
                k in value and fits(p, value[k]) for k, p in pattern.items()
            )
        case [*first, "..."]:
            return isinstance(value, list) and fits(first, value[: len(first)])
        case list():
            return isinstance(value, list) and len(pattern) == len(value) and all(map(fits, pattern, value))
    return bool(pattern == value)


def text(value: Any) -> Any:
    """Return a reply with its bytes decoded."""
    if isinstance(value, list):
        return [text(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value


@dataclass
class Recorder:
    """Keeps the calls of a client and their replies; for repeated calls, the last reply."""

    calls: list[tuple[list[str], Any]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, thread = (
            SyncTransport.run,
            threading.get_ident(),
        )  # workers of this process have separate threads

        def recording(transport: SyncTransport, call: Call[Any]) -> Any:
            def parse(reply: Any) -> Any:
                sent = [call.script, *(str(text(arg)) for arg in call.args)]
                if self.calls and self.calls[-1][0] == sent:
                    self.calls.pop()
                self.calls.append((sent, text(reply)))
                return call.parse(reply)

            is_kept = call.script not in AT_WILL and threading.get_ident() == thread
            return run(transport, replace(call, parse=parse) if is_kept else call)

        monkeypatch.setattr(SyncTransport, "run", recording)
        monkeypatch.setattr(SyncTransport, "begin", lambda transport, call: _Begun(transport, call))


@dataclass
class _Begun:
    transport: SyncTransport
    call: Call[Any]

    def finish(self) -> Any:
        return self.transport.run(self.call)

    def abandon(self) -> None:
        pass


def play(producer: Producer, case: dict[str, Any], calls: Recorder, start_worker: Callable[[], None]) -> None:
    """Play a case. Raises AssertionError at the first difference."""
    for number, step in enumerate(case["steps"]):
        calls.calls.clear()
        if step["do"] == "worker":
            start_worker()
            continue
        given = _given(producer, step["do"], step.get("with"))
        where = f"{case['title']}, step {number}: {step['do']}"
        assert fits(step["gives"], given), f"{where} gives {given!r}"
        sent, replies = [call for call, _ in calls.calls], [reply for _, reply in calls.calls]
        assert fits(step.get("sends", sent), sent), f"{where} sends {sent!r}"
        assert fits(step.get("replies", replies), replies), f"{where} is answered {replies!r}"


def _given(producer: Producer, operation: str, arguments: Any) -> Any:
    try:
        if operation == "call":
            script, *args = arguments
            transport = producer._connected().transport
            prefix = keys.prefix(producer.queue)
            return text(transport.run(Call(script, (prefix,), tuple(args), lambda reply: reply)))
        return OPERATIONS[operation](producer, arguments)
    except JobFailed as error:
        return {"error": "failed", "code": error.code}
    except PagemillError as error:
        return {"error": ERRORS.get(type(error), str(error).partition(": ")[2])}


def _result(result: Result) -> dict[str, Any]:
    first = result.outputs[0]
    return {
        "text": first.text,
        "texts": len(result.outputs),
        "finish_reason": first.finish_reason,
        "tokens": len(first.token_ids),
    }


def _streamed(producer: Producer, job_id: str) -> dict[str, Any]:
    whole, state = "", None
    for event in producer.job(job_id).stream():
        whole = event.text or "" if event.type == "snapshot" else whole + (event.text or "")
        state = event.state or state
    return {"text": whole, "state": state}


OPERATIONS: dict[str, Callable[[Producer, dict[str, Any]], Any]] = {
    "submit": lambda p, a: p.submit(a["job"], job_id=a["id"]).id,
    "status": lambda p, a: {"state": p.job(a["id"]).status().state},
    "result": lambda p, a: _result(p.job(a["id"]).result(timeout=120)),
    "stream": lambda p, a: _streamed(p, a["id"]),
    "cancel": lambda p, a: p.job(a["id"]).cancel(),
    "submit_batch": lambda p, a: p.submit_many(a["jobs"], batch_id=a["id"]).id,
    "batch_counts": lambda p, a: p.batch(a["id"]).counts().model_dump(),
    "batch_results": lambda p, a: [
        {"key": item.key, "state": item.state, "text": item.result.text if item.result else None}
        for item in p.batch(a["id"]).results(ordered=True)
    ],
}
