"""Stubs in Redis for payloads and results that are in a store.

A payload's stub is an envelope with the only member `stored`, signed like any other: the hash in it covers the content.
A result's stub has one member, which is never the first of a Result.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, Field, ValidationError

from pagemill.producer.wire.schema.needs import ENVELOPE_VERSION
from pagemill.producer.wire.schema.outputs import WireModel

MAX_URI = 1024
_MAX_STUB = 4096
_PAYLOAD = b'{"v":%d,"stored":' % ENVELOPE_VERSION
_RESULT = b'{"stored":'


class Reference(WireModel):
    """A file of the store, by its URI, the SHA-256 of its content in hex, and its size in bytes."""

    model_config = ConfigDict(extra="forbid")

    uri: str = Field(max_length=MAX_URI)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)
    tenant: str = "default"
    """The tenant of its job, which is part of a payload's signature."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file to be written to the store."""

    uri: str
    data: bytes


def payload_stub(reference: Reference) -> bytes:
    return _PAYLOAD + reference.model_dump_json().encode() + b"}"


def result_stub(reference: Reference) -> bytes:
    return _RESULT + reference.model_dump_json().encode() + b"}"


def read_payload_stub(envelope: bytes) -> Reference | None:
    """Return the reference in an envelope (without its signature); None if it is the job itself."""
    return _read(envelope, _PAYLOAD)


def read_result_stub(out: bytes) -> Reference | None:
    """Return the reference in a stored result; None if it is the result itself."""
    return _read(out, _RESULT)


def _read(text: bytes, opening: bytes) -> Reference | None:
    if not text.startswith(opening) or len(text) > _MAX_STUB:
        return None
    try:
        return Reference.model_validate_json(text[len(opening) : -1])
    except ValidationError:
        return None
