"""One webhook delivery: its body, its signature, and the request itself.

The signature is the Standard Webhooks one (https://www.standardwebhooks.com): HMAC-SHA256 over
`<id>.<timestamp>.<body>`, so that a receiver checks it with any of that scheme's libraries.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pagemill.producer.wire.calls.outbox import Notice
from pagemill.worker.webhooks.policy import Target

TIMEOUT_S = 10.0
"""The limit on connecting, and again on the whole exchange after it."""
SECRET_PREFIX = "whsec_"


class DeliveryFailed(Exception):
    """The receiver did not accept it; the message says why, without the URL."""


def secret_bytes(secret: str) -> bytes:
    """Decode `whsec_<base64>` as the receiver's libraries do; other text is taken as is. Raises ValueError."""
    if not secret.startswith(SECRET_PREFIX):
        return secret.encode()
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)


def body_of(queue: str, notice: Notice) -> bytes:
    """Return the event: the job's end, with its result or its error.

    Raises DeliveryFailed for a result that this worker can't open: another one may have the key, or this one later.
    """
    outcome = notice.outcome
    if outcome.state == "succeeded" and outcome.error is not None:
        raise DeliveryFailed(outcome.error.message)
    data: dict[str, Any] = {
        "id": outcome.job_id,
        "queue": queue,
        "tenant": notice.tenant,
        "state": outcome.state,
        "metadata": outcome.metadata,
        "finished_at": notice.finished_at,
        "result": outcome.result.model_dump(mode="json") if outcome.result is not None else None,
        "error": outcome.error.model_dump(mode="json") if outcome.error is not None else None,
    }
    return json.dumps({"type": f"job.{outcome.state}", "data": data}, ensure_ascii=False).encode()


def headers_of(job_id: str, body: bytes, secrets: Sequence[bytes], now: float) -> dict[str, str]:
    """Return the headers. `webhook-id` is the job's id, by which the receiver recognises a repeated delivery."""
    timestamp = str(int(now))
    signed = b".".join((job_id.encode(), timestamp.encode(), body))
    signatures = (
        "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in secrets
    )
    return {
        "content-type": "application/json",
        "user-agent": "pagemill",
        "webhook-id": job_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures),
    }


def deliver(target: Target, job_id: str, body: bytes, secrets: Sequence[bytes], tls: ssl.SSLContext) -> None:
    """POST the event once. Raises DeliveryFailed unless the answer is 2xx; redirects are not followed.

    Only the head of the answer is read, limited by http.client to 100 lines of 64 KiB, and all of it within
    `TIMEOUT_S`: a receiver that trickles bytes is cut off.
    """
    connection = _PinnedConnection(target, tls)
    try:
        connection.request("POST", target.path, body, headers_of(job_id, body, secrets, time.time()))
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        if connection.was_cut or isinstance(error, TimeoutError):
            raise DeliveryFailed(f"no answer within {TIMEOUT_S:g} s") from error
        raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise DeliveryFailed(f"the receiver answered {status}")


class _PinnedConnection(http.client.HTTPSConnection):
    """Connects to the vetted address, without a second lookup of the name. Cut off after `TIMEOUT_S`."""

    def __init__(self, target: Target, tls: ssl.SSLContext) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_S, context=tls)
        self._address = target.address
        self._tls = tls
        self._line: socket.socket | None = None
        self._timer = threading.Timer(TIMEOUT_S, self._cut)
        self.was_cut = False

    def connect(self) -> None:
        raw = socket.create_connection((self._address, self.port), self.timeout)
        try:
            self._line = raw.dup()  # TLS detaches the socket's descriptor
            self._timer.daemon = True
            self._timer.start()
            self.sock = self._tls.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise

    def close(self) -> None:
        self._timer.cancel()
        super().close()
        if self._line is not None:
            self._line.close()

    def _cut(self) -> None:
        assert self._line is not None, "the timer starts with the connection"
        self.was_cut = True
        with suppress(OSError):  # it has ended meanwhile
            self._line.shutdown(socket.SHUT_RDWR)
