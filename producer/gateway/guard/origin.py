"""Same-origin checks for a gateway without keys: pages of another origin may not use it.

A gateway with keys does not need them: a browser does not add an Authorization header automatically, and no response of
the gateway lets another origin's script add one.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from pagemill.producer.gateway.errors import ApiError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_host(headers: Headers) -> None:
    """Reject pages that reach this machine under their own name (DNS rebinding). Raises ApiError.

    The complete header is compared, since parsers differ on the name in `a@localhost` and `localhost#a`.
    """
    if not _LOOPBACK_HOST.fullmatch(headers.get("host", "")):
        raise ApiError(403, "without API keys the gateway answers to localhost only", "host_not_allowed")


def check_origin(method: str, headers: Headers) -> None:
    """Reject changes from cross-origin pages, although they could not read the response. Raises ApiError.

    As in Go's net/http.CrossOriginProtection: current browsers report whether the page is same-origin, older ones send
    its origin, and other clients send neither header.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        is_ours = site in ("same-origin", "none")
    else:
        is_ours = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    if not (is_ours or method in _READING):
        message = "without API keys the gateway takes nothing from pages of another origin"
        raise ApiError(403, message, "cross_origin")
