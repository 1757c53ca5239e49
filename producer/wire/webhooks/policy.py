"""Restricts webhooks to allowed hosts and ports and public addresses, and pins the vetted address."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.producer.wire.schema.webhook_url import HTTPS_PORT, WebhookUrl
from pagemill.producer.wire.webhooks.addresses import is_public


class Refused(Exception):
    """The URL is not allowed, and never will be: retrying is useless."""


class Unresolved(Exception):
    """The name has no address at present."""


@dataclass(frozen=True, slots=True)
class Target:
    """A vetted destination. The connection goes to `address`; TLS is checked against `host`."""

    host: str
    port: int
    path: str
    address: str


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """A host name, or with a leading `*.` every name below it, and the one port allowed on it."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> AllowedHost:
        """Parse `name`, `name:port` or `[address]:port`. Raises ValueError."""
        name, colon, port = text.lower().rpartition(":")
        if not colon or (
            ":" in name.strip("[]") and not name.endswith("]")
        ):  # no port; an address itself contains colons
            name, port = text.lower(), str(HTTPS_PORT)
        name = name.removeprefix("[").removesuffix("]")
        if not name or "/" in name or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r} is neither a host nor a host with a port")
        return cls(name, int(port))

    def admits(self, url: WebhookUrl) -> bool:
        return url.port == self.port and _matches(url.host, self.name)


@dataclass(frozen=True, slots=True)
class WebhookPolicy:
    """`hosts`: the allowed hosts, in the form of `AllowedHost.parse`; none: webhooks are off.

    `allow_private`: also loopback and private networks, for receivers inside your own. Raises ValueError for an invalid
    host. `setting` and `subject`: for messages, the name of the setting and the purpose of the hosts.
    """

    hosts: Sequence[str] = ()
    allow_private: bool = False
    setting: str = "webhook_hosts"
    subject: str = "webhook"

    def __post_init__(self) -> None:
        for host in self.hosts:
            AllowedHost.parse(host)

    @property
    def is_on(self) -> bool:
        return bool(self.hosts)

    def check(self, url: str) -> WebhookUrl:
        """Return the URL if its form, host and port are allowed. Raises Refused, whose message does not contain it."""
        if not self.is_on:
            raise Refused(f"{self.subject}s are switched off on this worker ({self.setting})")
        try:
            parsed = WebhookUrl.parse(url)
        except ValueError as error:
            raise Refused(
                str(error).replace("a webhook is", f"the {self.subject}'s address must be")
            ) from None
        if not any(AllowedHost.parse(host).admits(parsed) for host in self.hosts):
            raise Refused(f"the {self.subject}'s host, or its port, is not among {self.setting}")
        return parsed

    def resolve(self, url: str) -> Target:
        """Resolve the URL. Raises Refused (also when any address of the name is private) or Unresolved."""
        parsed = self.check(url)
        try:
            found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unresolved(f"the {self.subject}'s host has no address: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        if not self.allow_private and not all(is_public(address) for address in addresses):
            raise Refused(f"the {self.subject}'s host has a private address")
        return Target(parsed.host, parsed.port, parsed.path, addresses[0])


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return host == pattern
