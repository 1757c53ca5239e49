"""Files and batches through the openai package, and gateways that crash while they process them."""

from __future__ import annotations

import io
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch, Completion
from openai.types.responses import Response

from pagemill.producer.gateway.batches import runner
from pagemill.producer.gateway.batches.files import SHORTEST_TTL_S
from pagemill.producer.wire.calls.gateway import api_batches, stored_files
from pagemill.producer.wire.calls.limits import QueueLimits, set_limits
from pagemill.producer.wire.schema.sealing import SealedError
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway, gateway_process, write_keys
from tests.producer.scripted_worker import scripted_worker
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

ENDED = ("completed", "failed", "expired", "cancelled")


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"p{number}", "temperature": 0} | body,
        }
        for number in range(count)
    ]


def upload(client: OpenAI, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch").id


def start(client: OpenAI, rows: list[dict[str, Any]], **fields: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, rows),
        **({"endpoint": "/v1/completions", "completion_window": "24h"} | fields),
    )


def end_of(client: OpenAI, batch_id: str) -> Batch:
    def look() -> Batch | None:
        found = client.batches.retrieve(batch_id)
        return found if found.status in ENDED else None

    found: Batch = eventually(look, "the batch's end")
    return found


def rows_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def connect(served: Served, key: str = "none") -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S)


@contextmanager
def batching(url: str, queue: str, **settings: Any) -> Iterator[tuple[Served, OpenAI]]:
    """A gateway with these settings, its client, and a worker that echoes for the model m."""
    with (
        scripted_worker(url, queue),
        gateway(url, queue, **settings) as served,
        connect(served) as client,
    ):
        yield served, client


def test_a_batch_from_its_file_to_its_files(valkey_url: str, queue_name: str) -> None:
    rows = lines(450)
    rows[7]["body"]["prompt"] = "fail this"
    rows[9]["body"]["tools"] = [{"type": "function"}]
    with batching(valkey_url, queue_name, models=("m",)) as (_, client):
        batch = start(client, rows, metadata={"who": "me"})
        assert batch.status in ("validating", "in_progress")
        batch = end_of(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 450, "completed": 448, "failed": 2}
        assert batch.metadata == {"who": "me"}
        assert batch.usage is not None
        assert batch.usage.input_tokens == 448 * 2
        answers = rows_of(client, batch.output_file_id)
        assert [row["custom_id"] for row in answers] == [f"r{n}" for n in range(450) if n not in (7, 9)]
        assert len({row["id"] for row in answers}) == 448
        for row in answers:
            body = Completion.model_validate(row["response"]["body"])
            assert body.choices[0].text == f"p{row['custom_id'][1:]}"
        failed, refused = rows_of(client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("r7", 400)
        assert refused["response"]["body"]["error"]["code"] == "unsupported_feature"
        assert [found.id for found in client.batches.list()] == [batch.id]
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        # The computed results are in the files now; the queue no longer keeps them.
        assert len(list(client.files.list())) == 3
        client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)


def test_a_gateway_with_a_slow_clock_uses_the_servers(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 7200)
    with batching(valkey_url, queue_name, models=("m",)) as (_, client):
        batch = end_of(client, start(client, lines(3), completion_window="1h").id)
        assert batch.status == "completed"
        files = [
            client.files.retrieve(file_id) for file_id in (batch.input_file_id, batch.output_file_id or "")
        ]
    times = [batch.created_at, batch.in_progress_at, batch.completed_at, *(file.created_at for file in files)]
    assert all(at is not None and abs(at - clock()) < 3600 for at in times), times
    assert batch.expires_at == batch.created_at + 3600


@pytest.mark.slow
def test_a_batch_of_responses(valkey_url: str, queue_name: str) -> None:
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}}
    asked = [
        {"input": "one", "instructions": "Be brief.", "metadata": {"row": "1"}},
        {"input": "two", "text": form},
        *({"input": "three", name: value} for name, value in (("background", True), ("store", True))),
        {"input": "four", "previous_response_id": "resp_1"},
    ]
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/responses", "body": {"model": "echo"} | body}
        for n, body in enumerate(asked)
    ]
    with (
        running_worker(worker_config(valkey_url, queue_name, model="echo")),
        gateway(valkey_url, queue_name) as served,
        connect(served) as client,
    ):
        batch = end_of(client, start(client, rows, endpoint="/v1/responses").id)
        first, second = (
            Response.model_validate(row["response"]["body"]) for row in rows_of(client, batch.output_file_id)
        )
        refused = rows_of(client, batch.error_file_id)
    assert (first.status, first.output_text, first.metadata) == (
        "completed",
        "Be brief.\none\n",
        {"row": "1"},
    )
    assert first.usage is not None
    assert first.usage.output_tokens > 0
    assert second.output_text == '"yes"'
    assert [row["response"]["body"]["error"]["code"] for row in refused] == ["unsupported_feature"] * 3


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        (b"{torn", "invalid_json_line", 1),
        (b'{"custom_id": "a"}\n{"custom_id": "a"}\n', "mismatched_url", 1),
        (b"\n\n", "empty_file", None),
        (b'{"method": "POST"}', "missing_custom_id", 1),
    ],
)
def test_a_file_that_is_no_batch(
    valkey_url: str, queue_name: str, text: bytes, code: str, line: int | None
) -> None:
    with gateway(valkey_url, queue_name) as served, connect(served) as client:
        file = client.files.create(file=("in.jsonl", text), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        batch = end_of(client, batch.id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)


@pytest.mark.slow
def test_a_batch_outlives_its_gateways(valkey_url: str, queue_name: str, valkey_queue: Queue) -> None:
    """SIGKILL while it is submitted, while it runs, and while another gateway holds it; each request runs once."""
    rows = lines(600, temperature=1.0)
    with (
        gateway_process(valkey_url, queue_name, models=("m",)) as (served, process),
        connect(served) as client,
    ):
        batch_id = start(client, rows).id
        eventually(lambda: depth(valkey_queue) > 0, "the first requests in the queue")
        process.kill()
    with gateway_process(valkey_url, queue_name, models=("m",)) as (served, process):
        eventually(lambda: depth(valkey_queue) == 600, "all requests in the queue")
        process.kill()
    with (
        gateway(valkey_url, queue_name, models=("m",)) as served,
        connect(served) as client,
        scripted_worker(valkey_url, queue_name),
    ):
        batch = end_of(client, batch_id)
        assert batch.status == "completed"
        answers = rows_of(client, batch.output_file_id)
        assert [row["custom_id"] for row in answers] == [f"r{n}" for n in range(600)]
        texts = [row["response"]["body"]["choices"][0]["text"] for row in answers]
        assert texts == [f"p{n}" for n in range(600)]
    assert int(valkey_queue.client.hget(f"{valkey_queue.prefix}counts", "succeeded") or 0) == 600
    assert {"abopen", "fileuses"}.isdisjoint(valkey_queue.names())


def depth(queue: Queue) -> int:
    return int(queue.client.hget(f"{queue.prefix}counts", "queued") or 0)


@pytest.mark.slow
def test_a_cancelled_batch_delivers_what_was_done(valkey_url: str, queue_name: str) -> None:
    rows = lines(20)
    for row in rows[5:]:
        row["body"]["model"] = "nobody-serves-this"
    with (
        scripted_worker(valkey_url, queue_name),
        gateway(valkey_url, queue_name, models=("m", "nobody-serves-this")) as one,
        gateway(valkey_url, queue_name, models=("m", "nobody-serves-this")) as other,
        connect(one) as client,
        connect(other) as second,
    ):
        batch = start(client, rows)
        with pytest.raises(openai.ConflictError) as needed:
            client.files.delete(batch.input_file_id)
        assert needed.value.code == "file_in_use"
        eventually(
            lambda: (second.batches.retrieve(batch.id).request_counts or batch).completed == 5,  # type: ignore[union-attr]
            "the requests that somebody serves",
        )
        assert second.batches.cancel(batch.id).status == "cancelling"
        batch = end_of(second, batch.id)
        assert batch.status == "cancelled"
        assert [row["custom_id"] for row in rows_of(client, batch.output_file_id)] == [
            f"r{n}" for n in range(5)
        ]
        errors = rows_of(client, batch.error_file_id)
        assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
        assert len(errors) == 15


def test_tenants_do_not_meet(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = write_keys(path, a={"tenant": "a"}, b={"tenant": "b", "models": ("other",)})
    with (
        gateway(valkey_url, queue_name, keys_path=path) as served,
        connect(served, keys["a"]) as a,
        connect(served, keys["b"]) as b,
    ):
        mine = start(a, lines(3))
        assert list(b.files.list()) == []
        assert list(b.batches.list()) == []
        for ask in (
            lambda: b.files.retrieve(mine.input_file_id),
            lambda: b.files.content(mine.input_file_id),
            lambda: b.files.delete(mine.input_file_id),
            lambda: b.batches.retrieve(mine.id),
            lambda: b.batches.cancel(mine.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        with pytest.raises(openai.BadRequestError):
            b.batches.create(
                input_file_id=mine.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        theirs = end_of(b, start(b, lines(2)).id)
        errors = rows_of(b, theirs.error_file_id)
        assert {row["response"]["body"]["error"]["code"] for row in errors} == {"model_not_allowed"}


def test_an_output_that_finds_no_room_ends_in_the_error_file(valkey_url: str, queue_name: str) -> None:
    """Requests of a few bytes may have large results: a batch's output counts against its tenant's files."""
    with batching(valkey_url, queue_name, max_tenant_bytes=8_000, models=("m",)) as (_, client):
        ended = end_of(client, start(client, lines(40)).id)
        answered, refused = rows_of(client, ended.output_file_id), rows_of(client, ended.error_file_id)
        assert len(answered) + len(refused) == 40
        assert answered
        assert refused
        assert {row["response"]["body"]["error"]["code"] for row in refused} == {"output_too_large"}
        assert client.files.retrieve(ended.output_file_id or "").bytes < 16_000
        assert ended.request_counts is not None
        assert (ended.request_counts.completed, ended.request_counts.failed) == (len(answered), len(refused))


def test_files_have_their_limits(valkey_url: str, queue_name: str) -> None:
    with (
        gateway(
            valkey_url, queue_name, max_tenant_files=3, max_file_bytes=600_000, max_tenant_batches=1
        ) as served,
        connect(served) as client,
    ):
        text = b'{"x": "' + b"y" * 550_000 + b'"}\n'
        made = [client.files.create(file=(f"{n}.jsonl", text), purpose="batch") for n in range(3)]
        assert client.files.content(made[0].id).content == text
        with pytest.raises(openai.RateLimitError) as full:
            client.files.create(file=("one-more.jsonl", b"{}"), purpose="batch")
        assert full.value.code == "file_quota_exceeded"
        client.files.delete(made[0].id)
        with pytest.raises(openai.APIStatusError) as large:
            client.files.create(file=("large.jsonl", text * 2), purpose="batch")
        assert large.value.status_code == 413
        page = client.files.list(limit=1)
        assert page.has_more
        assert len(list(page)) == 2
        for listing in (client.files, client.batches):
            with pytest.raises(openai.NotFoundError, match="begin again without after"):
                listing.list(after=made[0].id)
        short = client.files.create(
            file=("short.jsonl", b"{}"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": SHORTEST_TTL_S},
        )
        assert short.expires_at is not None
        assert abs(short.expires_at - time.time() - SHORTEST_TTL_S) < 120
        open_one = {"input_file_id": short.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        forms: list[dict[str, Any]] = [
            {"data": {"purpose": "assistants"}, "files": {"file": b"x"}},
            {"data": {"purpose": "batch"}},
            {"data": {"purpose": "batch", "odd": "1"}, "files": {"file": b"x"}},
            {"data": {"purpose": "batch"}, "files": {"file": b""}},
        ]
        for form in forms:
            assert httpx.post(f"{served.base_url}/files", timeout=60, **form).status_code in (400, 415)
        for wrong in (
            {"completion_window": "soon"},
            {"endpoint": "/v1/moderations"},
            {"input_file_id": "../x"},
        ):
            answer = httpx.post(f"{served.base_url}/batches", json=open_one | wrong, timeout=60)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(wrong))


def test_an_upload_that_was_never_finished_is_no_file(valkey_queue: Queue) -> None:
    file = stored_files.StoredFile("file-1", 0.0, 10, 1, "name", "batch", int(time.time()))
    room = {"max_files": 1, "max_bytes": 100}
    assert valkey_queue.run(stored_files.begin(valkey_queue.name, "t", file, **room, upload_ms=1))
    assert valkey_queue.run(stored_files.find(valkey_queue.name, "t", "file-1")) is None
    assert valkey_queue.run(stored_files.finish(valkey_queue.name, "t", "file-1", 60.0)) is None
    other = stored_files.StoredFile("file-2", 0.0, 10, 1, "name", "batch", int(time.time()))
    eventually(
        lambda: valkey_queue.run(stored_files.begin(valkey_queue.name, "t", other, **room)), "its room again"
    )
    assert not valkey_queue.run(stored_files.begin(valkey_queue.name, "t", file, **room))
    valkey_queue.run(stored_files.write(valkey_queue.name, "t", "file-2", 0, b"0123456789"))
    stored = valkey_queue.run(stored_files.finish(valkey_queue.name, "t", "file-2", 60.0))
    assert stored is not None
    assert valkey_queue.run(stored_files.read(valkey_queue.name, "file-2", 0)) == b"0123456789"


def test_a_lease_has_one_holder(valkey_queue: Queue) -> None:
    """A gateway that resumes late does not change the current work of another gateway."""
    name, run = valkey_queue.name, valkey_queue.run
    file = stored_files.StoredFile("f", 0.0, 1, 1, "name", "batch", 0)
    run(stored_files.begin(name, "t", file, max_files=9, max_bytes=9))
    run(stored_files.write(name, "t", "f", 0, b"x"))
    run(stored_files.finish(name, "t", "f", 60.0))
    batch_id = f"b-{uuid.uuid4().hex[:8]}"
    create = api_batches.create(name, batch_id, "t", "f", "{}", window_s=60.0, max_open=1)
    assert [run(create), run(create)] == ["created", "created"]
    again = api_batches.create(name, "another", "t", "f", "{}", window_s=60.0, max_open=1)
    assert run(again) == "full"
    late = run(api_batches.claim(name, lease_ms=1))
    assert late is not None
    held = eventually(lambda: run(api_batches.claim(name)), "the lapse of the lease")
    assert held.batch.id == batch_id
    assert run(api_batches.claim(name)) is None
    assert run(api_batches.save(name, late, {"status": "in_progress"})) is None
    assert run(api_batches.save(name, held, {"status": "in_progress"})) == "in_progress"
    assert run(stored_files.delete(name, "t", "f")) == "in_use"
    cancelled = run(api_batches.cancel(name, "t", batch_id))
    assert cancelled is not None
    assert run(api_batches.cancel(name, "somebody", batch_id)) is None
    assert run(api_batches.save(name, held, {"status": "finalizing"})) == "cancelling"
    assert run(api_batches.end(name, late, {"status": "completed"})) is None
    assert run(api_batches.end(name, held, {"status": "cancelled"})) == "cancelled"
    assert run(api_batches.save(name, held, {"status": "in_progress"})) is None
    assert run(stored_files.delete(name, "t", "f")) == "deleted"
    assert run(again) == "no_file"


def test_a_batch_that_has_failed_is_not_being_cancelled(valkey_queue: Queue) -> None:
    """Its lease is kept until its webhooks are notified."""
    name, run = valkey_queue.name, valkey_queue.run
    run(
        stored_files.begin(
            name, "t", stored_files.StoredFile("f", 0.0, 1, 1, "n", "batch", 0), max_files=9, max_bytes=9
        )
    )
    run(stored_files.write(name, "t", "f", 0, b"x"))
    run(stored_files.finish(name, "t", "f", 60.0))
    run(api_batches.create(name, "b", "t", "f", "{}", window_s=60.0, max_open=1))
    held = run(api_batches.claim(name))
    assert held is not None
    run(api_batches.cancel(name, "t", "b"))
    assert run(api_batches.save(name, held, {"status": "in_progress"})) == "cancelling"
    assert run(api_batches.save(name, held, {"status": "failed", "event": "batch.failed"})) == "failed"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_batch_whose_input_cannot_be_decrypted_ends_at_its_deadline(
    is_late: bool, valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, another gateway may have the key."""
    tries: list[int] = []

    def sealed(*args: Any) -> Any:
        tries.append(1)
        raise SealedError("add the key k9")

    async def now(self: Any) -> int:
        return int(time.time()) + 2 * 86_400 * is_late

    monkeypatch.setattr(runner.stored_files, "read", sealed)
    monkeypatch.setattr(runner.BatchRun, "_now", now)
    with batching(valkey_url, queue_name, models=("m",), batch_lease_s=0.5, batch_poll_s=0.1) as (_, client):
        batch = start(client, lines(1))
        if not is_late:
            eventually(lambda: len(tries) > 1, "another try")
            assert client.batches.retrieve(batch.id).status == "validating"
            return
        failed = end_of(client, batch.id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [(row.code, row.message) for row in failed.errors.data or ()] == [("sealed", "add the key k9")]


@pytest.mark.slow
def test_the_output_grows_from_the_first_answer_on(valkey_url: str, queue_name: str) -> None:
    """Only complete lines, and later writes never change a line that was read, also those of another gateway."""
    settings: dict[str, Any] = {"models": ("m", "late"), "batch_lease_s": 0.5}
    rows = lines(30, prompt="x" * 20_000)
    for row in rows[:10]:
        row["body"]["model"] = "late"
    with (
        gateway(valkey_url, queue_name, **settings, batch_poll_s=3600) as idle,
        connect(idle) as client,
    ):
        with (
            scripted_worker(valkey_url, queue_name),
            gateway_process(valkey_url, queue_name, **settings) as (served, process),
        ):
            with connect(served) as owner:
                batch_id = start(owner, rows).id
            first = eventually(lambda: client.batches.retrieve(batch_id).output_file_id, "its output file")
            assert client.batches.retrieve(batch_id).status == "in_progress"
            early = client.files.content(first).text
            eventually(lambda: len(rows_of(client, first)) == 20, "what one worker answers")
            process.kill()
        part = client.files.content(first).text
        assert part.startswith(early)
        assert client.files.retrieve(first).bytes == len(part)
        with (
            gateway(valkey_url, queue_name, **settings),
            scripted_worker(valkey_url, queue_name, models=("late",)),
        ):
            eventually(lambda: client.files.retrieve(first).bytes >= len(part), "the same file")
            batch = end_of(client, batch_id)
        assert (batch.status, batch.output_file_id) == ("completed", first)
        whole = client.files.content(first).text
        assert whole.startswith(part)
        assert sorted(row["custom_id"] for row in map(json.loads, whole.splitlines())) == sorted(
            f"r{n}" for n in range(30)
        )


@pytest.mark.slow
def test_a_batch_of_inline_requests(valkey_url: str, queue_name: str) -> None:
    asked = [{"custom_id": row["custom_id"], "body": row["body"]} for row in lines(3)]
    form: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with batching(valkey_url, queue_name, models=("m",), max_tenant_batches=1) as (served, client):
        batch = client.batches.create(input_file_id=openai.omit, extra_body={"requests": asked}, **form)  # type: ignore[arg-type]
        batch = end_of(client, batch.id)
        assert {row["custom_id"] for row in rows_of(client, batch.output_file_id)} == {"r0", "r1", "r2"}
        assert [row["custom_id"] for row in rows_of(client, batch.input_file_id)] == ["r0", "r1", "r2"]
        for wrong in (
            {"requests": asked, "input_file_id": batch.input_file_id},
            {"requests": []},
            {"requests": ["x"]},
        ):
            answer = httpx.post(f"{served.base_url}/batches", json=form | wrong, timeout=60)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "requests")
        # A rejected batch does not leave a file behind.
        late = [{"custom_id": "a", "body": {"model": "nobody", "prompt": "x"}}]
        client.batches.create(input_file_id=openai.omit, extra_body={"requests": late}, **form)  # type: ignore[arg-type]
        files = {file.id for file in client.files.list()}
        with pytest.raises(openai.RateLimitError):
            client.batches.create(input_file_id=openai.omit, extra_body={"requests": late}, **form)  # type: ignore[arg-type]
        assert {file.id for file in client.files.list()} == files


@pytest.mark.slow
def test_running_requests_of_a_cancelled_batch_end(valkey_url: str, queue_name: str) -> None:
    rows = lines(4, model="echo", max_tokens=2000)
    for number, row in enumerate(rows):
        row["body"]["prompt"] = f"{number}" * 2000
    with (
        running_worker(worker_config(valkey_url, queue_name, model="echo:5")),
        gateway(valkey_url, queue_name) as served,
        connect(served) as client,
    ):
        queue = open_queue(valkey_url, queue_name)
        batch = start(client, rows)
        eventually(lambda: queue.client.zcard(f"{queue.prefix}leases") == 4, "the running requests")
        client.batches.cancel(batch.id)
        assert end_of(client, batch.id).status == "cancelled"
        assert not queue.client.zcard(f"{queue.prefix}leases")
        queue.transport.close()
        errors = rows_of(client, client.batches.retrieve(batch.id).error_file_id)
        assert [row["error"]["code"] for row in errors] == ["batch_cancelled"] * 4


def test_the_counts_grow_while_a_full_queue_holds_the_submission(
    valkey_url: str, queue_name: str, valkey_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHUNK", 1)
    valkey_queue.transport.run(set_limits(queue_name, QueueLimits(jobs=1)))
    rows = lines(6)
    for row in rows[-2:]:  # no worker runs them: the last one is never submitted
        row["body"]["model"] = "late"
    with batching(valkey_url, queue_name, models=("m", "late"), batch_poll_s=0.1) as (_, client):
        batch = start(client, rows)
        counts = eventually(
            lambda: (found := client.batches.retrieve(batch.id).request_counts) and found.completed and found,
            "completed requests",
        )
        assert counts.total == 6
