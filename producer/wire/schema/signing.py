"""Optional signatures of jobs, by producers that hold a key, and of checkpoints, by workers.

HMAC-SHA256, inserted as the first members of the JSON, so that exactly the following bytes are signed and the result is
still JSON:

    job         {"mac":"<hex>","signed_at":<unix ms>,  + the envelope without its first brace
                over queue, job id, tenant, signed_at and the envelope
    checkpoint  {"mac":"<hex>",                        + the delta without its first brace
                over queue, job id, fingerprint and the delta
    command     {"mac":"<hex>",                        + the command without its first brace
                over queue, worker id and the command

Keys are rotated without interruption: `Keys` checks with two and signs with the first. Without a key nothing is signed
or checked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.producer.wire.schema.errors import InvalidJob

MIN_KEY_BYTES = 16
MAX_KEYS = 2
MAX_SKEW_S = 3600.0
"""Maximum seconds between a signature's time and the submission by the server's clock, so that a recorded payload
cannot be replayed after its job was deleted."""
OUTPUT_SEPARATOR = b"\x1e"
"""Precedes each output that the queue appends to the payload of a job that waited for others; never occurs in JSON."""

_JOB = re.compile(rb'\{"mac":"([0-9a-f]{64})","signed_at":([0-9]{1,15}),')
_ENTRY = re.compile(rb'\{"mac":"([0-9a-f]{64})",')


@dataclass(frozen=True, slots=True)
class SignedPayload:
    """A parsed payload; without a signature `mac` is None."""

    envelope: bytes
    mac: str | None = None
    signed_at_ms: int = 0
    outputs: tuple[bytes, ...] = ()
    """The outputs that this job received from its parents, as JSON; never signed (dependencies.py)."""


def split_payload(payload: bytes) -> SignedPayload:
    """Split a payload into signature, envelope and outputs, without any checks."""
    payload, *outputs = payload.split(OUTPUT_SEPARATOR)
    match = _JOB.match(payload)
    if match is None:
        return SignedPayload(payload, outputs=tuple(outputs))
    return SignedPayload(
        b"{" + payload[match.end() :], match[1].decode(), int(match[2]), outputs=tuple(outputs)
    )


def unsigned_entry(entry: bytes) -> bytes:
    """Return a checkpoint entry without its signature, which is not checked."""
    match = _ENTRY.match(entry)
    return entry if match is None else b"{" + entry[match.end() :]


class Keys:
    """The keys of one producer or worker: none, one, or two during a rotation.

    Raises InvalidJob for keys that are too short or too many.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[str | bytes] = ()) -> None:
        self._keys = tuple(key.encode() if isinstance(key, str) else bytes(key) for key in keys)
        if len(self._keys) > MAX_KEYS:
            raise InvalidJob(f"at most {MAX_KEYS} HMAC keys: the one in use, and the one before or after it")
        if any(len(key) < MIN_KEY_BYTES for key in self._keys):
            raise InvalidJob(f"an HMAC key has at least {MIN_KEY_BYTES} bytes")

    def __repr__(self) -> str:
        return f"Keys({len(self._keys)})"

    def __bool__(self) -> bool:
        return bool(self._keys)

    def sign_payload(self, envelope: bytes, *, queue: str, job_id: str, tenant: str) -> bytes:
        """Return the envelope in its stored form; unchanged without a key."""
        if not self._keys:
            return envelope
        signed_at = int(time.time() * 1000)
        mac = _mac(self._keys[0], b"job", queue, job_id, tenant, str(signed_at), body=envelope)
        return b'{"mac":"%b","signed_at":%d,%b' % (mac.encode(), signed_at, envelope[1:])

    def check_payload(
        self, payload: SignedPayload, *, queue: str, job_id: str, tenant: str, submitted_at: float
    ) -> None:
        """Raise InvalidJob (`unsigned`) unless one of the keys signed the payload. Without a key all pass.

        `submitted_at`: unix seconds by the server's clock.
        """
        if not self._keys:
            return
        if payload.mac is None:
            raise InvalidJob("the job is not signed, and this worker runs signed jobs only", "unsigned")
        names = (queue, job_id, tenant, str(payload.signed_at_ms))
        if not self._is_valid(payload.mac, b"job", *names, body=payload.envelope):
            raise InvalidJob("the job's signature is not by a key that this worker knows", "unsigned")
        if abs(payload.signed_at_ms / 1000 - submitted_at) > MAX_SKEW_S:
            raise InvalidJob(
                f"the job's signature: its time is more than {MAX_SKEW_S:.0f} s from the submission's; "
                "synchronize the clocks of producer and Redis server (NTP)",
                "unsigned",
            )

    def sign_entry(self, entry: bytes, *, queue: str, job_id: str, fingerprint: str) -> bytes:
        """Return a checkpoint entry in its stored form; unchanged without a key."""
        if not self._keys:
            return entry
        mac = _mac(self._keys[0], b"checkpoint", queue, job_id, fingerprint, body=entry)
        return b'{"mac":"%b",%b' % (mac.encode(), entry[1:])

    def is_entry_ours(self, entry: bytes, *, queue: str, job_id: str, fingerprint: str) -> bool:
        """Return whether a worker with one of the keys wrote the entry; True without a key."""
        if not self._keys:
            return True
        match = _ENTRY.match(entry)
        if match is None:
            return False
        return self._is_valid(
            match[1].decode(), b"checkpoint", queue, job_id, fingerprint, body=b"{" + entry[match.end() :]
        )

    def sign_command(self, command: bytes, *, queue: str, worker_id: str) -> bytes:
        """Return a command to one worker in its stored form; unchanged without a key."""
        if not self._keys:
            return command
        mac = _mac(self._keys[0], b"command", queue, worker_id, body=command)
        return b'{"mac":"%b",%b' % (mac.encode(), command[1:])

    def check_command(self, stored: bytes, *, queue: str, worker_id: str) -> bytes:
        """Return a command without its signature. Raises InvalidJob (`unsigned`): no known key signed it."""
        match = _ENTRY.match(stored)
        command = unsigned_entry(stored)
        if self._keys and (
            match is None or not self._is_valid(match[1].decode(), b"command", queue, worker_id, body=command)
        ):
            raise InvalidJob("the command is not signed with a key that this worker knows", "unsigned")
        return command

    def _is_valid(self, mac: str, purpose: bytes, *names: str, body: bytes) -> bool:
        return any(hmac.compare_digest(mac, _mac(key, purpose, *names, body=body)) for key in self._keys)


def _mac(key: bytes, purpose: bytes, *names: str, body: bytes) -> str:
    """Compute the MAC. Names hold no NUL byte and the body comes last, so messages are unambiguous."""
    parts = (b"pagemill-" + purpose + b"-1", *(name.encode() for name in names), body)
    return hmac.digest(key, b"\0".join(parts), hashlib.sha256).hex()
