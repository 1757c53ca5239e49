"""One webhook delivery: its signature, and the request itself.

The signature is the Standard Webhooks one (https://www.standardwebhooks.com): HMAC-SHA256 over
`<id>.<timestamp>.<body>`, so that a receiver checks it with any of that scheme's libraries.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin

from pagemill.producer.wire.webhooks.policy import Target, WebhookPolicy

TIMEOUT_S = 10.0
"""The limit on connecting, and again on the complete exchange after it."""
MAX_REDIRECTS = 3
SECRET_PREFIX = "whsec_"
_CHUNK = 1 << 16


class DeliveryFailed(Exception):
    """The receiver did not accept it; the message has the reason, without the URL.

    Attributes:
        is_final: The receiver rejects further attempts (410).
        retry_after_s: Seconds to wait as it requested, or 0.
    """

    def __init__(self, message: str, *, is_final: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.retry_after_s = retry_after_s


class FetchFailed(Exception):
    """A file was not fetched; the message has the reason, without the URL. `is_final`: a retry would fail as well."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def secret_bytes(secret: str) -> bytes:
    """Decode `whsec_<base64>` as the receiver's libraries do; other text is used unchanged. Raises ValueError."""
    if not secret.startswith(SECRET_PREFIX):
        return secret.encode()
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)


def headers_of(event_id: str, body: bytes, secrets: Sequence[bytes], now: float) -> dict[str, str]:
    """Return the headers. Receivers recognize repeated deliveries by `webhook-id`."""
    timestamp = str(int(now))
    signed = b".".join((event_id.encode(), timestamp.encode(), body))
    signatures = (
        "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in secrets
    )
    return {
        "content-type": "application/json",
        "user-agent": "pagemill",
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures),
    }


def retry_after(header: str | None, now: float) -> float:
    """Return the seconds of a Retry-After header: a number, or an HTTP date. 0 without a valid one."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0


def deliver(
    target: Target, event_id: str, body: bytes, secrets: Sequence[bytes], tls: ssl.SSLContext
) -> None:
    """POST the event once. Raises DeliveryFailed unless the response is 2xx; redirects are not followed.

    Only the status line and headers are read, limited by http.client to 100 lines of 64 KiB, and within `TIMEOUT_S`: a
    receiver that trickles bytes is cut off.
    """
    connection = _PinnedConnection(target, tls, is_strict=True)
    try:
        connection.request("POST", target.path, body, headers_of(event_id, body, secrets, time.time()))
        with connection.getresponse() as response:
            status, wait = response.status, response.getheader("retry-after")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if connection.was_cut or isinstance(error, TimeoutError):
            raise DeliveryFailed(f"no answer within {TIMEOUT_S:g} s") from error
        raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise DeliveryFailed(
            f"the receiver answered {status}",
            is_final=status == http.client.GONE,
            retry_after_s=retry_after(wait, time.time()),
        )


def fetch(policy: WebhookPolicy, url: str, max_bytes: int, tls: ssl.SSLContext) -> bytes:
    """GET a file. The policy must allow every address that a redirect names.

    Raises:
        Refused, Unresolved: as `WebhookPolicy.resolve`.
        FetchFailed: the response is not the file, is larger, or takes more than `TIMEOUT_S`.
    """
    for _ in range(1 + MAX_REDIRECTS):
        found = _fetch_once(policy.resolve(url), max_bytes, tls)
        if isinstance(found, bytes):
            return found
        try:
            url = urljoin(url, found)
        except ValueError:
            raise FetchFailed("a redirect names no valid URL", is_final=True) from None
    raise FetchFailed(f"more than {MAX_REDIRECTS} redirects", is_final=True)


def _fetch_once(target: Target, max_bytes: int, tls: ssl.SSLContext) -> bytes | str:
    """Return the file, or the target of a redirect."""
    connection = _PinnedConnection(target, tls)
    try:
        connection.request("GET", target.path, headers={"user-agent": "pagemill"})
        with connection.getresponse() as response:
            place = response.getheader("location")
            if response.status in (301, 302, 303, 307, 308) and place:
                return place
            if response.status != 200:
                is_final = 400 <= response.status < 500 and response.status not in (408, 425, 429)
                raise FetchFailed(f"the server answered {response.status}", is_final=is_final)
            body = bytearray()
            while part := response.read(_CHUNK):
                body += part
                if len(body) > max_bytes:
                    raise FetchFailed(f"the file has more than {max_bytes} bytes", is_final=True)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if connection.was_cut or isinstance(error, TimeoutError):
            raise FetchFailed(f"no answer within {TIMEOUT_S:g} s") from error
        raise FetchFailed(type(error).__name__) from error
    finally:
        connection.close()
    if connection.was_cut:
        raise FetchFailed(f"no answer within {TIMEOUT_S:g} s")
    if response.length:  # announced but not received
        raise FetchFailed("the connection was closed before the end of the file")
    return bytes(body)


class _PinnedConnection(http.client.HTTPSConnection):
    """Connects to the vetted address, without a second lookup of the name. Cut off after `TIMEOUT_S`.

    `is_strict`: a connection that ends without TLS's notice is an error. http.client takes it for the headers' end.
    """

    def __init__(self, target: Target, tls: ssl.SSLContext, *, is_strict: bool = False) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_S, context=tls)
        self._address = target.address
        self._tls = tls
        self._is_strict = is_strict
        self._line: socket.socket | None = None
        self._timer = threading.Timer(TIMEOUT_S, self._cut)
        self.was_cut = False

    def connect(self) -> None:
        raw = socket.create_connection((self._address, self.port), self.timeout)
        try:
            self._line = raw.dup()  # TLS detaches the socket's descriptor
            self._timer.daemon = True
            self._timer.start()
            self.sock = self._tls.wrap_socket(
                raw, server_hostname=self.host, suppress_ragged_eofs=not self._is_strict
            )
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
