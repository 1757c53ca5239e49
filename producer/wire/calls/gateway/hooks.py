"""Webhooks that tenants have created, as calls. A value contains a secret, and is encrypted if there is a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.sealing import opened_metadata, ring
from pagemill.producer.wire.server.scripts import Call, as_map

MAX_HOOKS = 8
"""Maximum per tenant."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The tenant's readable webhooks by id, and whether the change was made."""

    is_done: bool
    values: dict[str, dict[str, Any]]


def read(queue: str, tenant: str) -> Call[Hooks]:
    """Return the tenant's webhooks."""
    return _change(queue, tenant, "", b"")


def add(queue: str, tenant: str, hook_id: str, value: bytes) -> Call[Hooks]:
    """Add a webhook, JSON. Fails if the tenant has MAX_HOOKS, or is being removed."""
    return _change(queue, tenant, hook_id, ring().seal(value, "metadata", hook_id))


def remove(queue: str, tenant: str, hook_id: str) -> Call[Hooks]:
    """Remove a webhook. Fails if the id is unknown."""
    return _change(queue, tenant, hook_id, b"")


def _change(queue: str, tenant: str, hook_id: str, value: bytes) -> Call[Hooks]:
    return Call("hooks", (keys.prefix(queue),), (tenant, hook_id, value, MAX_HOOKS), _hooks)


def _hooks(reply: list[Any]) -> Hooks:
    done, flat, *_ = reply
    opened = ((name, opened_metadata(value, name)) for name, value in as_map(flat).items())
    return Hooks(bool(done), {name: value for name, value in opened if value is not None})
