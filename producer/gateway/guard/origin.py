"""Which pages in a browser may use a gateway that asks for no keys: none of another origin.

Where keys are asked for, nothing of this is needed: a browser adds no Authorization header by itself, and no answer of
ours lets a foreign page's script add one.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from pagemill.producer.gateway.errors import ApiError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_host(headers: Headers) -> None:
    """A page must not reach this machine under a name of its own (DNS rebinding). Raises ApiError.

    The whole header is compared: in `a@localhost` and `localhost#a` some read another name than others.
    """
    if not _LOOPBACK_HOST.fullmatch(headers.get("host", "")):
        raise ApiError(403, "without API keys the gateway answers to localhost only", "host_not_allowed")


def check_origin(method: str, headers: Headers) -> None:
    """A page elsewhere must not change anything, though it could not read the answer. Raises ApiError.

    As Go's net/http.CrossOriginProtection: today's browsers say whether the page is of our origin, older ones say of
    which origin it is, and what is no browser says neither.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        is_ours = site in ("same-origin", "none")
    else:
        is_ours = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    if not (is_ours or method in _READING):
        message = "without API keys the gateway takes nothing from pages of another origin"
        raise ApiError(403, message, "cross_origin")
