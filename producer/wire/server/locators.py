"""Locators of a queue's current server: the master that Sentinel names, or the owner of its Cluster slot.

A queue is in one slot, so at any moment one server has all of it, and an ordinary client of that server suffices: the
driver library's own cluster client does not support EVALSHA in pipelines. The server must be located again for each new
connection, and stale connections must be dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import redis
from redis import crc, sentinel

Address = tuple[str, int]
SlotRange = tuple[int, int, Address]
"""The first and the last slot, and the master that owns them."""

ASK_TIMEOUT_S = 2.0
"""Timeout of one query to one server; then the next one is queried."""


class Locator(Protocol):
    """Finds the address to connect to. Thread-safe; blocks for one or a few network round trips."""

    def locate(self) -> Address:
        """Return the current address. Raises redis' ConnectionError if no server knows it."""
        ...


class SentinelLocator:
    """Finds the master of a service, as named by the first Sentinel that answers."""

    def __init__(self, sentinels: Sequence[Address], service: str, options: dict[str, Any]) -> None:
        """`options`: credentials and TLS of the Sentinels themselves."""
        self._service = service
        self._lock = threading.Lock()
        timeouts = {"socket_timeout": ASK_TIMEOUT_S, "socket_connect_timeout": ASK_TIMEOUT_S, "retry": None}
        self._sentinel = sentinel.Sentinel(list(sentinels), sentinel_kwargs=options | timeouts)

    def locate(self) -> Address:
        with self._lock:
            try:
                host, port = self._sentinel.discover_master(self._service)
            except redis.ResponseError as error:
                raise redis.ConnectionError(
                    f"Sentinel denies the address of {self._service}: {error}"
                ) from error
            finally:
                # Sentinels restart with other addresses, so idle connections to them would become stale.
                for client in self._sentinel.sentinels:
                    client.connection_pool.disconnect()
        return str(host), int(port)


class ClusterLocator:
    """Finds the master that owns a key's slot, as named by the first node that answers."""

    def __init__(self, seeds: Sequence[Address], key: str, options: dict[str, Any]) -> None:
        """`options`: credentials and TLS. Discovered nodes are queried too, in case the seeds no longer exist."""
        self.slot: int = crc.key_slot(key.encode())
        self._options = options
        self._lock = threading.Lock()
        self._seeds = list(seeds)
        self._known: list[Address] = []

    def locate(self) -> Address:
        reasons: list[str] = []
        for node, ranges in self._answers(reasons):
            for first, last, owner in ranges:
                if first <= self.slot <= last:
                    return owner
            reasons.append(f"{node[0]}:{node[1]}: no node serves slot {self.slot}")
        raise redis.ConnectionError("no Cluster node can be asked: " + "; ".join(reasons))

    def masters(self) -> list[Address]:
        """Return every master that owns slots. Raises as `locate` does."""
        reasons: list[str] = []
        for node, ranges in self._answers(reasons):
            if ranges:
                return list(dict.fromkeys(owner for _, _, owner in ranges))
            reasons.append(f"{node[0]}:{node[1]}: no node serves any slot")
        raise redis.ConnectionError("no Cluster node can be asked: " + "; ".join(reasons))

    def _answers(self, reasons: list[str]) -> Iterator[tuple[Address, list[SlotRange]]]:
        """Yield the slots that each responding node reports; the others' failures go into `reasons`."""
        with self._lock:
            nodes = list(dict.fromkeys((*self._known, *self._seeds)))
        for node in nodes:
            try:
                yield node, self._owned(self._slots(node), node)
            except (redis.RedisError, OSError) as error:
                reasons.append(f"{node[0]}:{node[1]}: {error}")

    def _slots(self, node: Address) -> list[Any]:
        with redis.Redis(
            host=node[0],
            port=node[1],
            socket_timeout=ASK_TIMEOUT_S,
            socket_connect_timeout=ASK_TIMEOUT_S,
            retry=None,
            **self._options,
        ) as client:
            connection = client.connection_pool.get_connection()
            # Read raw, because the driver's versions parse this reply differently.
            connection.send_command("CLUSTER", "SLOTS")
            reply: list[Any] = connection.read_response()
        return reply

    def _owned(self, ranges: list[Any], asked: Address) -> list[SlotRange]:
        owned = []
        for first, last, master, *_ in ranges:
            # A node that does not know its own address sends an empty one: it is the queried node.
            host = _text(master[0])
            address = (host if host and host != "?" else asked[0], int(master[1]))
            owned.append((int(first), int(last), address))
        with self._lock:
            self._known = [owner for _, _, owner in owned]
        return owned


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
