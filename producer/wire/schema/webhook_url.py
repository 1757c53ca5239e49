"""What may stand in a job's `webhook` field. Which hosts are called is the worker's to say."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_URL = 2048


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    host: str
    """Lower case."""
    port: int
    path: str
    """With the query."""

    @classmethod
    def parse(cls, url: str) -> WebhookUrl:
        """Raises ValueError, which does not quote the URL: it often holds a token."""
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
        if parts.scheme != "https" or not host or "@" in parts.netloc or "#" in url or port == 0:
            raise wrong
        return cls(host, port or 443, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
