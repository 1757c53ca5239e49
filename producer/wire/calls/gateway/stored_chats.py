"""Chats that a tenant can list, and the metadata of a stored job, as calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import metadata_json
from pagemill.producer.wire.schema.sealing import opened_metadata, ring
from pagemill.producer.wire.server.scripts import Call

LOOK_CHATS = 200
"""Maximum number of chats that one call reads."""


@dataclass(frozen=True, slots=True)
class ChatPage:
    """Chats that succeeded: ids and metadata. `last` is the id to continue after, "" at the end."""

    rows: list[tuple[str, dict[str, Any]]]
    last: str


def page(queue: str, tenant: str, after: str, *, is_desc: bool) -> Call[ChatPage]:
    """Return some of the tenant's chats, those after the id `after` ("": from the first); none if it is unknown."""
    args = (tenant, after, int(is_desc), LOOK_CHATS)
    return Call("chat_list", (keys.prefix(queue),), args, _page)


def set_metadata(queue: str, tenant: str, job_id: str, metadata: Mapping[str, Any]) -> Call[bool]:
    """Replace the metadata of a job of the tenant; False if there is none. Raises ValueError if it is too large."""
    sealed = ring().seal(metadata_json(dict(metadata)).encode(), "metadata", job_id)
    args = (tenant, job_id, sealed)
    return Call("metadata_set", (keys.prefix(queue),), args, bool)


def _page(reply: list[Any]) -> ChatPage:
    rows, last, *_ = reply
    named = ((job_id.decode(), text) for job_id, text, *_ in rows)
    return ChatPage([(job_id, opened_metadata(text, job_id) or {}) for job_id, text in named], last.decode())
