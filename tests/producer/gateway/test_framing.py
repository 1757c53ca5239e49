"""Requests as bytes: their boundaries, input that is not HTTP, and clients that disconnect inside a body."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill.producer.gateway.guard.limits import MAX_HEAD_BYTES
from tests.producer.driving import open_queue
from tests.producer.gateway.serving import Served, gateway, read_all, write_keys
from tests.worker.harness import PATIENCE_S, eventually

BODY = b'{"model": "later", "prompt": "x"}'
JSON = "content-type: application/json\r\n"
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """For any input, no log contains a traceback or an error."""
    caplog.set_level(logging.INFO)
    yield
    found = caplog.get_records("call")
    loud = [record for record in found if record.levelno >= logging.ERROR or record.exc_info]
    assert [record.getMessage() for record in loud] == []


def statuses(answer: bytes) -> list[int]:
    """The statuses of all responses on one connection."""
    return [int(piece.split(b" ", 1)[0]) for piece in answer.split(b"HTTP/1.1 ")[1:]]


REFUSED: tuple[list[int], ...] = ([400], [431], [])
"""The last case: the response was lost, because the connection was closed while more bytes arrived."""


def told(served: Served, raw: bytes) -> list[int]:
    with served.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(raw)
        return statuses(read_all(connection))


def head(method: str = "POST", path: str = "/v1/completions", extra: str = JSON) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{extra}".encode()


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


PATHS = [("POST", "/v1/completions"), ("POST", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/unknown"),
         ("GET", "/v1/models"), ("GET", "/healthz"), ("HEAD", "/healthz"), ("DELETE", "/v1/files/x")]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("order", [("content-length: %d", "transfer-encoding: chunked"),
                                   ("Transfer-Encoding: Chunked", "Content-Length: %d")])  # fmt: skip
@pytest.mark.parametrize("length", [0, 4, 1000])
def test_two_lengths_end_the_connection(
    served: Served, method: str, path: str, order: tuple[str, str], length: int
) -> None:
    """The body for one side must not be another request for the other side."""
    said = "".join(f"{line}\r\n" for line in order) % length
    answer = served.ask(head(method, path, JSON + said) + b"\r\n" + chunked(b"1234") + SMUGGLED)
    assert statuses(answer) == [400]
    assert b"connection: close" in answer.lower()
    if method != "HEAD":
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "lines",
    [
        "content-length: 3\r\ncontent-length: 4\r\n", "content-length: 3, 4\r\n", "content-length: +3\r\n",
        "content-length: 3 \x0b\r\n", "content-length: 0x3\r\n", "content-length: -3\r\n", "content-length: 3.0\r\n",
        "content-length: \r\n", f"content-length: {'9' * 5000}\r\n", "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: chunked, chunked\r\n", "transfer-encoding: identity\r\n", "transfer-encoding: xchunked\r\n",
        "transfer-encoding: \x0bchunked\r\n", "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", "transfer-encoding : chunked\r\n",
        " transfer-encoding: chunked\r\n", "x: \x00\r\n", "x y: z\r\n", ": z\r\n", "x\r\n", "x: a\rb\r\n",
    ],
    ids=lambda lines: ascii(lines[:60]),
)  # fmt: skip
def test_heads_that_mean_nothing_end_the_connection(served: Served, lines: str) -> None:
    start = f"POST /v1/completions HTTP/1.1\r\n{lines}host: localhost\r\n{JSON}\r\n"
    answer = served.ask(start.encode() + SMUGGLED)
    assert statuses(answer) == [400]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/healthz", "/v1/completions", "/v1/files", "/v1/unknown", "/metrics"])
@pytest.mark.parametrize(
    "chunk",
    [b"ZZ\r\n", b"-1\r\n", b"0x4\r\n1234\r\n", b"4\r\n12345\r\n", b"4\n1234\n", b"4\r\n1234", b"f" * 40 + b"\r\n",
     b"4;" + b"x" * (2 * MAX_HEAD_BYTES), b"0\r\n" + b"x: y\r\n" * MAX_HEAD_BYTES, b"0\r\nbad trailer\r\n\r\n"],
    ids=lambda chunk: ascii(chunk[:12]),
)  # fmt: skip
def test_broken_chunks_end_the_connection(served: Served, method: str, path: str, chunk: bytes) -> None:
    """In one piece with the request line and headers, and during the response."""
    start = head(method, path, f"{JSON}transfer-encoding: chunked\r\n") + b"\r\n"
    assert len(told(served, start + chunk + SMUGGLED)) == 1
    with served.connect() as connection, contextlib.suppress(OSError):  # it may already be closed
        connection.sendall(start)
        time.sleep(0.02)
        connection.sendall(chunk + SMUGGLED)
        connection.shutdown(socket.SHUT_WR)
        assert len(statuses(read_all(connection))) <= 1, "nothing after a broken chunk is a request"


def test_odd_spellings_that_all_sides_read_alike(served: Served) -> None:
    """A folded line, bare line feeds, a duplicate length, a chunk extension."""
    start = "POST /v1/unknown HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    for rest in (
        b"x: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"transfer-encoding: chunked\r\n\r\n2;name=value\r\n{}\r\n0\r\n\r\n",
    ):
        assert statuses(served.ask(start.encode() + rest)) == [404]
    assert statuses(served.ask(b"GET /healthz HTTP/1.1\nhost: localhost\nconnection: close\n\n")) == [200]


def test_extensions_of_chunks_are_bounded(served: Served) -> None:
    """In any form: an endless line, and many lines of the maximum length."""
    start = head(extra=f"{JSON}transfer-encoding: chunked\r\n") + b"\r\n"
    assert told(served, start + b"1;" + b"x" * (1 << 20)) in REFUSED
    many = (b"1;" + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n \r\n") * 50 + b"0\r\n\r\n"
    assert statuses(
        served.ask(head(extra=f"{JSON}connection: close\r\ntransfer-encoding: chunked\r\n") + b"\r\n" + many)
    ) == [400]


@pytest.mark.slow
def test_floods_of_headers(served: Served) -> None:
    for number, line in (
        (6_000, "a: b"),
        (20_000, "a:"),
        (60_000, "a:"),
        (1, "a: " + "b" * 500_000),
        (100_000, "a: b"),
    ):
        lines = "".join(f"{line}\r\n" for _ in range(number))
        answer = served.ask(head("GET", "/healthz", lines) + b"connection: close\r\n\r\n")
        assert statuses(answer) in ([400], [431])
    flood = b"".join(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" for _ in range(500))
    last = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert statuses(served.ask(flood + last)) == [200] * 501


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * (3 << 20)
)
READERS = [
    ("/v1/completions", JSON, b'{"model": "' + b"x" * 100_000),
    ("/v1/chat/completions", JSON, b'{"model": "'),
    ("/v1/batches", JSON, b'{"input_'),
    ("/v1/batches/batch_" + "0" * 24 + "/cancel", JSON, b"{"),
    ("/v1/files", "content-type: multipart/form-data; boundary=b\r\n", FORM),
]


@contextmanager
def going_away(served: Served, is_rude: bool) -> Iterator[socket.socket]:
    with served.connect() as connection:
        yield connection
        if is_rude:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def temporary_files() -> int:
    """Open files without a name."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).endswith(" (deleted)")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_rude", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize(("path", "kind", "begin"), READERS, ids=[row[0][:20] for row in READERS])
def test_hanging_up_inside_a_body(
    valkey_url: str, queue_name: str, path: str, kind: str, begin: bytes, is_chunked: bool, is_rude: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """No log line above debug, and nothing of the upload remains: in memory, in files, or in the queue."""
    queue = open_queue(valkey_url, queue_name)
    with gateway(valkey_url, queue_name, models=("later",), max_uploads=2) as served:
        eventually(served.is_alive, "the gateway")
        before = temporary_files()
        if is_chunked:
            raw = (
                head(path=path, extra=f"{kind}transfer-encoding: chunked\r\n")
                + b"\r\n"
                + chunked(begin)[:-5]
                + b"5\r\nhal"
            )
        else:
            raw = head(path=path, extra=f"{kind}content-length: {2 * len(begin)}\r\n") + b"\r\n" + begin
        for number in range(1, 4):
            with going_away(served, is_rude) as connection:
                connection.sendall(raw)
                eventually(lambda: "requests_in_flight 2.0\n" in served.metrics(), "the request")
            eventually(lambda: "requests_in_flight 1.0\n" in served.metrics(), "its end")
            gone = re.compile(rf'requests_total{{method="POST",route=".*",status="499"}} {number}\.0')
            if not path.endswith("/cancel"):  # does not need a body, and has received its response
                assert gone.search(served.metrics()), served.metrics()
        eventually(lambda: temporary_files() == before, "the end of its temporary files")
        assert {name for name in queue.names() if not name.startswith("meta")} == set()
        assert [record for record in caplog.records if "disconnect" in record.getMessage().lower()] == []
        form = {"data": {"purpose": "batch"}, "files": {"file": ("f", b"{}")}}
        for _ in range(3):
            assert httpx.post(f"{served.base_url}/files", timeout=PATIENCE_S, **form).status_code == 200  # type: ignore[arg-type]
    queue.transport.close()


def test_slow_uploads_of_one_key_leave_room_for_others(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.json", slow={}, other={})
    kind = "content-type: multipart/form-data; boundary=b\r\n"
    raw = head(
        path="/v1/files", extra=f"{kind}authorization: Bearer {keys['slow']}\r\ncontent-length: 9999\r\n"
    )

    def upload(key: str) -> httpx.Response:
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("f", b"{}")}}
        headers = {"authorization": f"Bearer {keys[key]}"}
        return httpx.post(f"{served.base_url}/files", headers=headers, timeout=PATIENCE_S, **form)

    settings: dict[str, Any] = {"max_uploads": 3, "max_key_uploads": 2, "keys_path": tmp_path / "keys.json"}
    with gateway(valkey_url, queue_name, models=("later",), **settings) as served:
        with served.connect() as first, served.connect() as second:
            for number, connection in enumerate((first, second)):
                connection.sendall(raw + b"\r\n" + FORM[:300])
                eventually(
                    lambda number=number: f"in_flight {number + 2}.0\n" in served.metrics(), "the upload"
                )
            refused = upload("slow")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_uploads")
            assert refused.headers["retry-after"]
            assert upload("other").status_code == 200
        eventually(lambda: upload("slow").status_code == 200, "room for the key again")


@pytest.mark.slow
def test_a_download_ends_though_its_request_has_not(valkey_url: str, queue_name: str) -> None:
    """The gateway does not wait for an unwanted body."""
    text = b"x" * (24 << 20)
    with gateway(valkey_url, queue_name, body_timeout_s=0.5) as served:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("x", text)}}
        made = httpx.post(f"{served.base_url}/files", timeout=PATIENCE_S, **form).json()  # type: ignore[arg-type]
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", served.port))
            slow.settimeout(PATIENCE_S)
            slow.sendall(head("GET", f"/v1/files/{made['id']}/content", "content-length: 5\r\n") + b"\r\n")
            time.sleep(1.5)
            answer = read_all(slow)
    assert statuses(answer[:20]) == [200]
    assert len(answer.partition(b"\r\n\r\n")[2]) == len(text)
