"""The cost of a malicious receiver to a delivery: bounded time, and no memory."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pagemill.producer.wire.webhooks import delivery
from pagemill.producer.wire.webhooks.delivery import DeliveryFailed, deliver, retry_after
from pagemill.producer.wire.webhooks.policy import Target
from tests.topologies import Certificates

Answer = Callable[[], Iterator[bytes]]

_FOR_S = 8.0
"""How long a receiver continues; much longer than the limit of a delivery here."""
_PAUSE_S = 0.05


class Receiver:
    """Accepts one connection, reads nothing of the request, and sends the response piece by piece."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None) -> None:
        self._answer, self._tls = answer, tls
        self._end = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with suppress(OSError), connection:
            stream = connection if self._tls is None else self._tls.wrap_socket(connection, server_side=True)
            with stream:
                for piece in itertools.islice(self._answer(), int(_FOR_S / _PAUSE_S)):
                    stream.sendall(piece)
                    if self._end.wait(_PAUSE_S):
                        return

    def close(self) -> None:
        self._end.set()
        self._listener.close()
        self._thread.join(30)


def byte_by_byte(text: bytes) -> Answer:
    return lambda: (text[i : i + 1] for i in range(len(text)))


def call(receiver: Receiver, certificates: Certificates, body: bytes = b"{}") -> None:
    tls = ssl.create_default_context(cafile=str(certificates.ca_file))
    deliver(Target("localhost", receiver.port, "/", "127.0.0.1"), "id", body, [b"secret"], tls)


@pytest.mark.parametrize(
    ("answer", "is_tls", "error"),
    [
        pytest.param(byte_by_byte(b"HTTP/1.1 200 " + b"o" * 1000), True, "no answer within", id="status"),
        pytest.param(
            lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"x-y: z\r\n")), True,
            "no answer within", id="headers",
        ),
        pytest.param(
            lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"), True, "no answer within", id="continue",
        ),
        # The header of a handshake message of 16 KiB, and then its bytes: TLS is never established.
        pytest.param(
            byte_by_byte(b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb" + b"a" * 1000), False, "no answer within", id="TLS",
        ),
        pytest.param(lambda: iter([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 5000]), True, "headers", id="flood"),
    ],
)  # fmt: skip
def test_an_answer_that_never_ends_is_cut_off(
    answer: Answer, is_tls: bool, error: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    if error != "headers":
        monkeypatch.setattr(delivery, "TIMEOUT_S", 0.5)  # ten times the pause between two bytes
    receiver = Receiver(answer, certificates.server_context() if is_tls else None)
    try:
        with pytest.raises(DeliveryFailed, match=error):
            call(receiver, certificates)
    finally:
        receiver.close()


def test_a_connection_that_closes_within_the_headers_is_no_answer(certificates: Certificates) -> None:
    receiver = Receiver(lambda: iter([b"HTTP/1.1 200 OK\r\nx-y: z"]), certificates.server_context())
    try:
        with pytest.raises(DeliveryFailed, match="EOF"):
            call(receiver, certificates)
    finally:
        receiver.close()


def test_a_body_is_not_waited_for(certificates: Certificates) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n"
    receiver = Receiver(
        lambda: itertools.chain([head], itertools.repeat(b"x" * 1000)), certificates.server_context()
    )
    try:
        call(receiver, certificates)
    finally:
        receiver.close()


def test_no_thread_or_socket_outlives_a_delivery(certificates: Certificates) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, files = threading.active_count(), open_files()
    for _ in range(3):
        receiver = Receiver(lambda: iter([b"HTTP/1.1 204 No Content\r\n\r\n"]), certificates.server_context())
        call(receiver, certificates)
        receiver.close()
    assert open_files() <= files
    assert threading.active_count() <= before + 1  # a timer that is just being cancelled


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0), ("", 0.0), ("120", 120.0), (" 7 ", 7.0), ("-5", 0.0), ("1.5", 0.0), ("٣", 0.0),
        ("9" * 4000, 0.0), ("Thu, 01 Jan 1970 00:20:00 GMT", 200.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 99 Jan 1970 00:00:00 GMT", 0.0), ("soon", 0.0),
    ],
)  # fmt: skip
def test_the_seconds_of_retry_after(header: str | None, seconds: float) -> None:
    assert retry_after(header, 1000.0) == seconds


@pytest.mark.parametrize(("status", "is_final"), [(410, True), (429, False), (500, False)])
def test_a_refusal_says_whether_and_when_to_try_again(
    status: int, is_final: bool, certificates: Certificates
) -> None:
    head = f"HTTP/1.1 {status} No\r\nretry-after: 30\r\n\r\n".encode()
    receiver = Receiver(lambda: iter([head]), certificates.server_context())
    try:
        with pytest.raises(DeliveryFailed, match=f"answered {status}") as failed:
            call(receiver, certificates)
    finally:
        receiver.close()
    assert (failed.value.is_final, failed.value.retry_after_s) == (is_final, 30.0)
