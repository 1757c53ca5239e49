"""Where webhooks may go: allowed hosts, https, public addresses. What is connected to is what was checked."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.producer.wire.schema.webhook_url import WebhookUrl


class Refused(Exception):
    """The URL may not be called, now or ever: trying again is no use."""


class Unresolved(Exception):
    """The name has no address now."""


@dataclass(frozen=True, slots=True)
class Target:
    """A vetted place to deliver to. The connection goes to `address`; TLS is checked against `host`."""

    host: str
    port: int
    path: str
    address: str


@dataclass(frozen=True, slots=True)
class WebhookPolicy:
    """`hosts`: names that may be called, `*.example.com` meaning every name below it; none: webhooks are off.

    `allow_private`: also loopback and private networks, for receivers inside one's own.
    """

    hosts: Sequence[str] = ()
    allow_private: bool = False

    @property
    def is_on(self) -> bool:
        return bool(self.hosts)

    def check(self, url: str) -> WebhookUrl:
        """The URL, if its form and its host are allowed. Raises Refused, which does not quote it."""
        if not self.is_on:
            raise Refused("webhooks are switched off on this worker (webhook_hosts)")
        try:
            parsed = WebhookUrl.parse(url)
        except ValueError as error:
            raise Refused(str(error)) from None
        if not any(_matches(parsed.host, pattern.lower()) for pattern in self.hosts):
            raise Refused("the webhook's host is not among webhook_hosts")
        return parsed

    def resolve(self, url: str) -> Target:
        """Where to connect. Raises Refused (also when any address of the name is private) or Unresolved."""
        parsed = self.check(url)
        try:
            found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unresolved(f"the webhook's host has no address: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        if not self.allow_private and not all(is_public(address) for address in addresses):
            raise Refused("the webhook's host has a private address")
        return Target(parsed.host, parsed.port, parsed.path, addresses[0])


def is_public(address: str) -> bool:
    """Whether the address is on the open internet: not loopback, private, link-local, reserved or multicast."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is not None and not is_public(str(inner)):
            return False
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64: the last four bytes are the IPv4 address
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return host == pattern
