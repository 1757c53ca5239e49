"""Bad input and malicious clients: the right status, bounded memory, and a gateway that survives."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.producer.gateway.serving import Served, gateway, gateway_process, read_all
from tests.worker.harness import PATIENCE_S, eventually

ASK = {"model": "echo", "prompt": "alive", "max_tokens": 5}


@pytest.fixture(scope="module", autouse=True)
def serving(served: Served) -> None:
    """The worker may not have announced its models yet."""
    url = f"{served.base_url}/completions"
    eventually(lambda: httpx.post(url, json=ASK, timeout=60).status_code == 200, "the gateway to serve")


@pytest.fixture(autouse=True)
def still_alive(served: Served) -> Iterator[None]:
    """After each test of this module the gateway works as before."""
    yield
    assert (
        httpx.post(f"{served.base_url}/completions", json=ASK, timeout=60).json()["choices"][0]["text"]
        == "alive"
    )


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return found


def post(
    body: bytes, kind: str = "application/json", path: str = "/v1/completions", extra: str = ""
) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\nconnection: close\r\n{extra}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"{'a': 1}", b'{"model": NaN}', b"\xff\xfe", b"\x00" * 100,
        b"[" * 200_000, b'{"a":' * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b'{"model": "\\ud800", "prompt": "x"}',
        b'{"model": "echo", "prompt": "\\ud800"}', b'{"model": "echo", "prompt": "x", "n": 1e400}',
        b'{"model": "echo", "prompt": "x", "stop": ["' + b"y" * 5000 + b'"]}', b'{"\\ud800": 1}',
        b'{"model": "echo", "prompt": {"$ne": 1}}', b'{"model": ["echo"], "prompt": "x"}',
        b'{"model": "echo", "prompt": "x", "seed": 9223372036854775808}', b'{"model": "echo", "prompt": []}',
        b'{"model": "echo", "prompt": [true]}', b'{"model": "echo", "prompt": "x", "stream": "yes"}',
        b'{"model": "echo", "prompt": "x", "stream": true, "stream_options": {"include_usage": 1}}',
        b'{"model": "echo", "prompt": "x", "logit_bias": {"x": 1}}',
        b'{"model": "echo", "prompt": "x", "response_format": {"type": "xml"}}',
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)  # fmt: skip
def test_broken_bodies(served: Served, body: bytes) -> None:
    answer = served.ask(post(body))
    assert status_of(answer) == 400
    assert error_of(answer)["type"] == "invalid_request_error"


def test_other_content_types_are_refused(served: Served) -> None:
    """A page in a browser may post these without a preflight request."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert status_of(served.ask(post(json.dumps(ASK).encode(), kind))) == 415


def test_foreign_host_names_are_refused(served: Served) -> None:
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "[", ""):
        answer = served.ask(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert status_of(answer) == 403


def test_bodies_that_are_too_large(served: Served) -> None:
    """With and without a declared length: the sender can read the response, and little of the body is kept."""
    large = b"x" * (9 << 20)
    answer = served.ask(post(large))
    assert (status_of(answer), error_of(answer)["code"]) == (413, "body_too_large")
    pieces = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(64)) + b"0\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    assert status_of(served.ask(head + pieces)) == 413


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fetc%2fpasswd", "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "file-%00", "file-" + "0" * 23,
        "file-" + "0" * 25, "file-" + "Z" * 24, "file-..%5c..%5c", "*", "file-" + "0" * 24, "file-%0d%0aset-cookie:x",
        "a" * 8000,
    ],
    ids=lambda name: name[:24],
)  # fmt: skip
def test_ids_are_no_paths(served: Served, name: str) -> None:
    for rest in ("", "/content"):
        answer = served.ask(
            f"GET /v1/files/{name}{rest} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        )
        assert status_of(answer) == 404
        assert b"root:" not in answer
        assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0].lower()


def test_a_file_name_is_only_a_name(served: Served) -> None:
    boundary = "limit"
    evil = "../../etc/cron.d/x\\..\\y\x07"
    body = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{evil}"\r\n\r\n'
        f"{{}}\r\n--{boundary}--\r\n"
    ).encode()
    answer = served.ask(post(body, f"multipart/form-data; boundary={boundary}", "/v1/files"))
    assert status_of(answer) == 200
    made = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert made["filename"] == "y"
    content = httpx.get(f"{served.base_url}/files/{made['id']}/content", timeout=60)
    assert content.headers["content-disposition"] == f'attachment; filename="{made["id"]}.jsonl"'


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\nx: 1\x00\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=lambda raw: raw[:40].decode(errors="replace"),
)  # fmt: skip
def test_what_is_no_http(served: Served, raw: bytes) -> None:
    answer = served.ask(raw)
    assert status_of(answer) == 400
    assert error_of(answer)["code"] == "invalid_http"


def test_a_head_that_is_too_long(served: Served) -> None:
    """Rejected during or after the upload, whichever is detected first."""
    answer = served.ask(
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: "
        + b"y" * 70_000
        + b"\r\nconnection: close\r\n\r\n"
    )
    assert status_of(answer) in (400, 431)


def test_headers_cannot_be_smuggled_in(served: Served) -> None:
    ask = post(json.dumps(ASK).encode(), extra="x-request-id: a\r\nidempotency-key: \x7f\r\n")
    answer = served.ask(ask)
    assert status_of(answer) == 400
    for header in ("x-request-timeout: nan", "x-request-timeout: -1", "x-request-timeout: 1e9"):
        assert status_of(served.ask(post(json.dumps(ASK).encode(), extra=f"{header}\r\n"))) == 400


@pytest.mark.slow
def test_unknown_paths_and_methods(served: Served) -> None:
    assert httpx.get(f"{served.base_url}/moderations", timeout=60).json()["error"]["code"] == "unknown_url"
    wrong = httpx.put(f"{served.base_url}/files", timeout=60)
    assert wrong.status_code == 405
    assert {"GET", "POST"} <= set(wrong.headers["allow"].replace(" ", "").split(","))


@pytest.mark.slow
def test_slow_clients_are_let_go(valkey_url: str, queue: str) -> None:
    """A request line and headers that do not arrive, a body that does not, and a response that is not read."""
    limits = {"head_timeout_s": 3.0, "body_timeout_s": 3.0, "send_timeout_s": 3.0}
    with gateway(valkey_url, queue, **limits) as served, ExitStack() as open_ones:
        silent, dribbling, half = (open_ones.enter_context(served.connect()) for _ in range(3))
        dribbling.sendall(b"GET /v1/models HTTP/1.1\r\nhost: local")
        half.sendall(post(b"{" * 1000)[:-500])
        assert read_all(silent) == b""
        assert read_all(dribbling) == b""
        assert status_of(read_all(half)) == 408

        text = b"x" * (24 << 20)
        upload = {"data": {"purpose": "batch"}, "files": {"file": ("x", text)}}
        made = httpx.post(f"{served.base_url}/files", timeout=PATIENCE_S, **upload).json()  # type: ignore[arg-type]
        deaf = open_ones.enter_context(socket.socket())
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", served.port))
        deaf.sendall(f"GET /v1/files/{made['id']}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        gone = 'method="GET",route="/v1/files/{file_id}/content",status="499"} 1.0'
        eventually(lambda: gone in served.metrics(), "the end of the answer that nobody takes")
        eventually(lambda: connections(served) <= 2, "the end of its connection")


@pytest.mark.slow
def test_more_requests_than_it_takes(valkey_url: str, queue_name: str) -> None:
    with gateway(valkey_url, queue_name, models=("m",), max_in_flight=2) as served, ExitStack() as waiting:
        for _ in range(2):
            waiting.enter_context(served.connect()).sendall(post(b'{"model": "m", "prompt": "x"}'))
        eventually(lambda: "requests_in_flight 3.0\n" in served.metrics(), "two requests and ours")
        busy = httpx.post(f"{served.base_url}/completions", json=ASK, timeout=60)
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
        assert busy.headers["retry-after"]
        waiting.close()
        eventually(lambda: "cancelled_jobs_total 2.0\n" in served.metrics(), "the jobs of those who hung up")
        assert httpx.get(f"{served.base_url}/models", timeout=60).status_code == 200


@pytest.mark.slow
def test_connections_that_ask_nothing_make_room(valkey_url: str, queue: str) -> None:
    with gateway(valkey_url, queue, max_connections=40) as served, ExitStack() as idle:
        for _ in range(200):
            idle.enter_context(served.connect())
        assert httpx.post(f"{served.base_url}/completions", json=ASK, timeout=60).status_code == 200
        found = {family.name: family for family in text_string_to_metric_families(served.metrics())}
        assert found["pagemill_gateway_connections"].samples[0].value <= 42
        assert {"pagemill_gateway_requests", "pagemill_gateway_request_seconds"} <= set(found)
        assert not any("echo" in str(sample.labels) for f in found.values() for sample in f.samples)


@pytest.mark.slow
def test_ten_thousand_idle_connections(valkey_url: str, queue: str) -> None:
    """Its memory stays bounded, it responds, and silent clients are disconnected after their timeout."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"this machine lets a process have {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (12_000, hard))
    try:
        with (
            gateway_process(valkey_url, queue, head_timeout_s=60.0) as (served, process),
            ExitStack() as idle,
        ):
            before = resident_kib(process.pid)
            for _ in range(10_000):
                idle.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S))
            eventually(lambda: "connections 1000" in served.metrics(), "the connections")
            grown = resident_kib(process.pid) - before
            assert grown < 400 * 1024, f"{grown} KiB for 10,000 connections"
            assert httpx.post(f"{served.base_url}/completions", json=ASK, timeout=60).status_code == 200
            eventually(lambda: connections(served) < 10, "the silent ones' end", 180.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connections(served: Served) -> int:
    (line,) = [
        row for row in served.metrics().splitlines() if row.startswith("pagemill_gateway_connections ")
    ]
    return int(float(line.split()[1]))


def resident_kib(pid: int) -> int:
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return int(line.split()[1])
