"""The files of the live page, the page of jobs and the playground, and the conditions for serving them.

Plain HTML, CSS and JavaScript from `monitoring/page/`, `monitoring/jobs_page/` and `monitoring/play_page/`: there is no
build step and no external resource.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers sent with the page and all of its files."""


@dataclass(frozen=True, slots=True)
class Asset:
    content_type: str
    body: bytes


@cache
def assets(folder: str = "page") -> dict[str, Asset]:
    """Return every file of a page by name. Only these are served: no path is ever built from a request."""
    return {
        path.name: Asset(_TYPES[suffix], path.read_bytes())
        for path in (files("pagemill.monitoring") / folder).iterdir()
        if (suffix := "." + path.name.rpartition(".")[2]) in _TYPES
    }


def is_loopback(host: str) -> bool:
    """Return True if a server bound to `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_known_host(header: str | None, names: Sequence[str] = ()) -> bool:
    """Return True if a Host header names this server: an IP address, localhost, this machine, or one of `names`.

    Any other name may be an attacker's domain that resolves to this server, so that their page can read this one (DNS
    rebinding). This is not possible with an address in the header.
    """
    host = _without_port(header or "")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        known = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}
        return host.lower().rstrip(".") in known
    return True


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]
