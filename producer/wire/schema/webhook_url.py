"""URLs in a job's `webhook` field. The worker decides which hosts are called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

MAX_URL = 2048
HTTPS_PORT = 443
_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*"
)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    host: str
    """A name or an address, in lower case."""
    port: int
    path: str
    """The path with the query."""

    @classmethod
    def parse(cls, url: str) -> WebhookUrl:
        """Parse a URL. Raises ValueError, whose message does not contain the URL: it often contains a token."""
        wrong = ValueError(
            "a webhook is an https URL of at most 2048 ASCII characters, without user or fragment"
        )
        if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise wrong
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if (
            parts.scheme != "https"
            or not host
            or not _is_host(host)
            or "@" in parts.netloc
            or "#" in url
            or port == 0
        ):
            raise wrong
        return cls(host, port or HTTPS_PORT, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def _is_host(text: str) -> bool:
    """Return whether it is a DNS name (IDNs in xn-- form) without a final dot, or an address in full form."""
    try:
        return "%" not in text and bool(ip_address(text))
    except ValueError:
        # Resolvers interpret a name that ends in a number as an address in a legacy notation.
        return _NAME.fullmatch(text) is not None and _NUMBER.fullmatch(text.rpartition(".")[2]) is None
