"""Background and stored responses as the openai package requests them; the echo model repeats the prompt."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from pagemill.producer.client.sync import Producer
from tests.producer.gateway.serving import Served, gateway, gateway_process, write_keys
from tests.producer.gateway.weather import ANSWER, BETWEEN, FLAT
from tests.worker.harness import PATIENCE_S, WorkerProcess, process_settings, running_worker, worker_config

TOOL: Any = FLAT | {"strict": True}
ASK: dict[str, Any] = {
    "model": "echo",
    "input": ANSWER,
    "max_output_tokens": 400,
    "temperature": 0.0,
    "tools": [TOOL],
    "background": True,
}
LONG = " ".join(f"word-{i}" for i in range(60))
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


@pytest.fixture(scope="module")
def worker_settings() -> dict[str, Any]:
    return {"model": "echo:2", **PARSERS}


def client_of(served: Served, key: str = "none") -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S)


def finished(client: OpenAI, response_id: str) -> Any:
    ends_at = time.monotonic() + PATIENCE_S
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < ends_at, found
        time.sleep(0.05)
    return found


def texts(events: Iterable[Any]) -> dict[tuple[str, int], str]:
    """Join the deltas by kind and item."""
    found: dict[tuple[str, int], str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            place = (event.type, event.output_index)
            found[place] = found.get(place, "") + event.delta
    return found


@pytest.mark.slow
def test_a_background_response_from_creation_to_deletion(client: OpenAI) -> None:
    asked = ASK | {"instructions": "Be brief.", "metadata": {"row": "7"}, "service_tier": "flex"}
    begun = client.responses.create(**asked)
    assert (begun.status, begun.background, begun.output, begun.service_tier) == ("queued", True, [], "flex")
    done = finished(client, begun.id)
    assert (done.id, done.status, done.created_at) == (begun.id, "completed", begun.created_at)
    assert done.completed_at >= done.created_at
    assert "Let me look." in done.output_text
    same = client.responses.create(**asked | {"background": False, "store": False})
    assert [item.type for item in done.output] == [item.type for item in same.output]
    assert done.usage.total_tokens == same.usage.total_tokens
    for name in (
        "instructions",
        "metadata",
        "tools",
        "max_output_tokens",
        "temperature",
        "tool_choice",
        "text",
    ):
        assert getattr(done, name) == getattr(begun, name) == getattr(same, name), name
    client.responses.delete(begun.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            gone(begun.id)


@pytest.mark.parametrize("large", [False, True], ids=["small schema", "large schema"])
def test_a_schema_is_returned_with_the_response(client: OpenAI, large: bool) -> None:
    names = [f"name-{i}" for i in range(1000 if large else 2)]
    shape: Any = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"enum": names}}}
    begun = client.responses.create(model="echo", input="x", text=shape, background=True)
    done = finished(client, begun.id)
    assert json.loads(done.output_text) in names
    assert done.text.format.schema_ == {"enum": names}
    assert (done.text.format.name, done.text.format.strict) == ("n", True)


@pytest.mark.parametrize("forced", [False, True])
def test_a_deep_schema_can_be_stored(client: OpenAI, forced: bool) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(25):
        schema = {"type": "object", "properties": {"a": schema}, "additionalProperties": False}
    shape: Any = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}}
    fields: dict[str, Any] = {"tools": ASK["tools"], "tool_choice": "required"} if forced else {}
    begun = client.responses.create(model="echo", input="x", text=shape, background=True, **fields)
    assert finished(client, begun.id).text.format.schema_ == schema


@pytest.mark.parametrize("text", [ANSWER, pytest.param(BETWEEN, marks=pytest.mark.slow)])
def test_a_stream_continues_after_any_of_its_events(client: OpenAI, text: str) -> None:
    """For any split of the text into deltas: no text is lost or repeated, and the numbers are the same."""
    with client.responses.create(**ASK | {"input": text}, stream=True) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    numbers = [event.sequence_number for event in events]
    assert all(a < b for a, b in itertools.pairwise(numbers))
    response_id = events[0].response.id
    places = {event.sequence_number: event for event in events}
    for event in events[1:]:
        after = event.sequence_number
        with client.responses.retrieve(response_id, stream=True, starting_after=after) as stream:
            rest = list(stream)
        head = [places[number] for number in numbers if number <= after]
        assert texts([*head, *rest]) == texts(events), after
        assert [e.type for e in [*head, *rest] if not e.type.endswith(".delta")] == [
            kind for kind in kinds if not kind.endswith(".delta")
        ]
        assert all(e.sequence_number > after for e in rest)
        assert not rest or rest[-1].sequence_number == numbers[-1]
    # Between two events, too: a number in the middle of a delta.
    with client.responses.retrieve(response_id, stream=True, starting_after=5) as stream:
        tail = list(stream)
    assert tail[0].sequence_number > 5
    final = client.responses.retrieve(response_id)
    assert events[-1].response.output == final.output


@pytest.mark.slow
def test_a_disconnected_client_does_not_end_a_background_response(client: OpenAI) -> None:
    with client.responses.create(model="echo", input=LONG, background=True, stream=True) as stream:
        first = next(iter(stream))
    assert "word-59" in finished(client, first.response.id).output_text  # type: ignore[union-attr]


@pytest.mark.slow
def test_streams_continue_when_gateway_and_worker_were_killed(valkey_url: str, tmp_path: Path) -> None:
    """A client reads through two kills, each between two events, and receives the complete text once."""
    queue = f"q-{uuid.uuid4().hex[:12]}"
    settings = process_settings(valkey_url, queue, model="echo:30", checkpoint_s=0.1, lease_s=1.5, **PARSERS)
    seen: list[Any] = []
    worker = WorkerProcess(settings, tmp_path / "worker-1.log")
    try:
        with gateway_process(valkey_url, queue) as (served, process):
            served.wait_for("echo")
            with client_of(served) as client:
                stream = client.responses.create(model="echo", input=LONG, background=True, stream=True)
                for event in stream:
                    seen.append(event)
                    if len(texts(seen).get(("response.output_text.delta", 0), "")) > 40:
                        break
            process.kill()
        response_id = seen[0].response.id
        worker.kill()
        worker = WorkerProcess(settings, tmp_path / "worker-2.log")
        with gateway_process(valkey_url, queue) as (served, _), client_of(served) as client:
            after = seen[-1].sequence_number
            with client.responses.retrieve(response_id, stream=True, starting_after=after) as stream:
                seen += list(stream)
            final = client.responses.retrieve(response_id)
    finally:
        worker.kill()
    assert (final.status, seen[-1].type) == ("completed", "response.completed")
    assert texts(seen) == {("response.output_text.delta", 0): final.output_text}
    numbers = [event.sequence_number for event in seen]
    assert all(a < b for a, b in itertools.pairwise(numbers))


@pytest.mark.slow
def test_a_conversation_continues_by_the_id_of_its_last_response(client: OpenAI) -> None:
    first = client.responses.create(model="echo", input="one", instructions="Be brief.", store=True)
    second = client.responses.create(
        model="echo", input="two", previous_response_id=first.id, store=True, instructions="Be kind."
    )
    assert second.previous_response_id == first.id
    # The echo model repeats its messages: instructions of the first response are not carried over.
    assert second.output_text == "Be kind.\none\nBe brief.\none\n\ntwo\n"
    third = client.responses.create(model="echo", input="three", previous_response_id=second.id)
    assert third.output_text.startswith("one\n")
    assert third.output_text.endswith("two\n\nthree\n")
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    with pytest.raises(openai.NotFoundError):  # the response was not stored
        client.responses.create(model="echo", input="four", previous_response_id=third.id)
    called = client.responses.create(**ASK | {"background": False, "store": True})
    call: Any = called.output[2]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    after = client.responses.create(model="echo", input=[output], previous_response_id=called.id)
    assert after.output_text.endswith("sun\n")


def test_a_background_response_is_cancelled(
    served: Served, client: OpenAI, valkey_url: str, queue: str
) -> None:
    asked: dict[str, Any] = {"model": "echo", "input": LONG * 3, "max_output_tokens": 1500}
    with client.responses.create(**asked, background=True, stream=True) as stream:
        events = iter(stream)
        response_id = next(events).response.id
        assert client.responses.cancel(response_id).status == "cancelled"
        last: Any = list(events)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    assert client.responses.retrieve(response_id).status == "cancelled"
    again = client.responses.cancel(response_id)
    assert (again.status, again.error) == ("cancelled", None)
    with pytest.raises(openai.BadRequestError, match="no output"):
        client.responses.create(model="echo", input="x", previous_response_id=response_id)
    stored = client.responses.create(model="echo", input="x", store=True)
    with pytest.raises(openai.BadRequestError, match="only background"):
        client.responses.cancel(stored.id)


def test_a_failed_response_has_the_error_of_its_job(client: OpenAI) -> None:
    begun = client.responses.create(
        model="echo", input="x", background=True, extra_headers={"x-request-timeout": "0.001"}
    )
    failed = finished(client, begun.id)
    assert (failed.status, failed.error.code) == ("failed", "deadline_exceeded")
    with client.responses.retrieve(begun.id, stream=True) as stream:
        last: Any = list(stream)[-1]
    assert (last.type, last.response.status, last.response.error.code) == (
        *("response.failed", "failed"),
        "deadline_exceeded",
    )


def test_a_repeated_request_finds_its_response(client: OpenAI) -> None:
    header = {"idempotency-key": uuid.uuid4().hex}
    ids = {
        client.responses.create(model="echo", input="x", background=True, extra_headers=header).id
        for _ in range(2)
    }
    assert len(ids) == 1


def test_requests_that_are_stored_differently_do_not_share_a_key(client: OpenAI) -> None:
    header = {"idempotency-key": uuid.uuid4().hex}
    ways: list[dict[str, Any]] = [
        {},
        {"store": True},
        {"background": True},
        {"store": True, "metadata": {"a": "b"}},
    ]
    made = [
        client.responses.create(model="echo", input="x", extra_headers=header, **way)
        for way in (*ways, *ways)
    ]
    assert [one.id for one in made[:4]] == [one.id for one in made[4:]]
    assert len({one.id for one in made}) == 4
    for one in made[1:4]:
        assert client.responses.retrieve(one.id).id == one.id
    with pytest.raises(openai.ConflictError):
        client.responses.create(model="echo", input="other", background=True, extra_headers=header)
    header = {"idempotency-key": uuid.uuid4().hex}
    both, one = (
        client.completions.create(model="echo", prompt=prompts, extra_headers=header, max_tokens=1)
        for prompts in (["a", "b"], ["a"])
    )
    assert (len(both.choices), len(one.choices)) == (2, 1)


@pytest.mark.slow
def test_the_responses_of_a_tenant_are_its_own(valkey_url: str, tmp_path: Path) -> None:
    queue = f"q-{uuid.uuid4().hex[:12]}"
    made = write_keys(
        tmp_path / "keys.json",
        red={"tenant": "red"},
        blue={"tenant": "blue", "operator": True},
        limited={"tenant": "red", "models": ["other"]},
    )
    with (
        running_worker(worker_config(valkey_url, queue, model="echo")),
        gateway(valkey_url, queue, keys_path=tmp_path / "keys.json") as served,
        client_of(served, made["red"]) as red,
    ):
        begun = red.responses.create(model="echo", input="secret", background=True)
        finished(red, begun.id)
        for key in (made["blue"], made["limited"]):
            with client_of(served, key) as other:
                for ask in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
                    with pytest.raises(openai.NotFoundError):
                        ask(begun.id)
                if key == made["blue"]:
                    with pytest.raises(openai.NotFoundError):
                        other.responses.create(model="echo", input="x", previous_response_id=begun.id)
        assert finished(red, begun.id).output_text == "secret\n"


def test_ids_that_are_no_responses(served: Served, client: OpenAI, valkey_url: str, queue: str) -> None:
    """Also jobs from other sources: their metadata may look like a response's."""
    marks: list[Any] = [None, {"a": 1}, {"response": 1}, {"response": {"text": 5}}, {"response": {"x": 1}}]
    # Only the last job is like one that the gateway submits.
    with Producer(valkey_url, queue=queue) as producer:
        turn: Any = {"messages": [{"role": "user", "content": "x"}], "model": "echo", "keep_input": True}
        plain = [producer.submit(**turn, metadata=mark) for mark in marks]
        plain.append(producer.submit(prompt="x", model="echo", metadata={"response": {}}, keep_input=True))
        chat = producer.submit(**turn, metadata={"response": {}})
        for handle in [*plain, chat]:
            handle.result(PATIENCE_S)
    for name in ["resp_", "resp_x y", "x", "input_tokens", *(f"resp_{handle.id}" for handle in plain)]:
        answer = httpx.get(f"{served.base_url}/responses/{name}", timeout=PATIENCE_S)
        assert answer.status_code == 404, name
    assert client.responses.retrieve(f"resp_{chat.id}").output_text == "x\n"
    for query in (
        "stream=1",
        "starting_after=3",
        "stream=true&starting_after=x",
        "stream=true&starting_after=-1",
    ):
        answer = httpx.get(f"{served.base_url}/responses/resp_{chat.id}?{query}", timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), query


@pytest.mark.slow
def test_the_bound_of_what_a_response_keeps(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="metadata: has more than 16384 bytes"):
        client.responses.create(model="echo", input="x", store=True, metadata={"a": "b" * 16_300})
