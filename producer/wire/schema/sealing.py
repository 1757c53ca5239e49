"""Optional encryption at rest of the input and output of jobs: AES-256-GCM, with keys of the process.

A sealed value is JSON, so that a reader without the key recognizes it:

    {"sealed":"<key id>","data":"<base64 of nonce, ciphertext and tag>"}

The kind of the value and the name of its owner are authenticated with it, so that values cannot be swapped:

    job      the envelope, and the file in a store that replaces it, by the job's id
    result   a result, and its file, by the id of the job that computed it
    delta    an entry of a checkpoint, by the job's id
    chunk    a part of a file of the gateway, by the file's id and its number
    metadata the caller's metadata of a job or a batch of the gateway, by its id

The nonce is the start of an HMAC-SHA256, under a key derived from the same secret, over the name and the plaintext: a
call that is sent twice must write the same bytes. Different plaintexts share a nonce only by a collision of 96 bits.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import shlex
import subprocess
from functools import lru_cache
from typing import Any, Literal

from pagemill.producer.wire.schema.errors import InvalidJob

KEYS_VARIABLE = "PAGEMILL_ENCRYPTION_KEYS"
COMMAND_VARIABLE = "PAGEMILL_ENCRYPTION_KEYS_COMMAND"
REQUIRED_VARIABLE = "PAGEMILL_ENCRYPTION_REQUIRED"
KEY_BYTES = 32
COMMAND_S = 30
_NONCE_BYTES = 12
_KEY = re.compile(r"([A-Za-z0-9._-]{1,32}):([A-Za-z0-9+/=_-]+)")
_SEALED = re.compile(rb'\{"sealed":"([A-Za-z0-9._-]{1,32})","data":"([A-Za-z0-9+/=]*)"\}')
_OPENING = b'{"sealed":"'

Kind = Literal["job", "result", "delta", "chunk", "metadata"]
_NAMES: dict[Kind, str] = {
    "job": "job",
    "result": "result",
    "delta": "checkpoint entry",
    "chunk": "file",
    "metadata": "metadata",
}


class SealedError(InvalidJob):
    """A sealed value cannot be decrypted here. `code` is `sealed`; the message contains the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "sealed")


class KeyRing:
    """The keys of a process: the first encrypts, all decrypt. Without keys nothing is encrypted. Thread-safe."""

    def __init__(self, secrets: dict[str, bytes], *, is_required: bool = False) -> None:
        """`is_required`: reject unencrypted values. Raises InvalidJob if a package is missing."""
        self.is_required = is_required
        self._keys = {key_id: _Key(secret) for key_id, secret in secrets.items()}
        self._first = next(iter(self._keys), "")

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._keys)})"

    def __bool__(self) -> bool:
        return bool(self._keys)

    def seal(self, plain: bytes, kind: Kind, name: str) -> bytes:
        """Return a value in its stored form; unchanged without a key."""
        if not self._keys:
            return plain
        data = base64.b64encode(self._keys[self._first].encrypt(plain, _bound(kind, name)))
        return b'%b%b","data":"%b"}' % (_OPENING, self._first.encode(), data)

    def open(self, stored: bytes, kind: Kind, name: str) -> bytes:
        """Return the plaintext of a stored value. Unencrypted values are returned unchanged, unless they are rejected.

        Raises:
            SealedError: it can't be opened, or is not encrypted although encryption is required.
        """
        if not stored.startswith(_OPENING):
            self.check_clear(kind)
            return stored
        found = _SEALED.fullmatch(stored)
        if found is None:
            raise SealedError("the stored value is damaged: it is sealed, and can't be read")
        key_id = found[1].decode()
        if key_id not in self._keys:
            raise SealedError(
                f"encrypted with key {key_id}, which this process does not have: add it to {KEYS_VARIABLE}, "
                "behind the key that is in use"
            )
        try:
            data = base64.b64decode(found[2], validate=True)
        except binascii.Error:
            raise SealedError("the stored value is damaged: it is sealed, and can't be read") from None
        return self._keys[key_id].decrypt(data, _bound(kind, name))

    def check_clear(self, kind: Kind) -> None:
        """Raise SealedError if encryption is required: a value of this kind is not encrypted."""
        if self.is_required:
            raise SealedError(
                f"the {_NAMES[kind]} is not encrypted, and {REQUIRED_VARIABLE} is set here: set {KEYS_VARIABLE} for "
                "the process that wrote it"
            )


class _Key:
    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise InvalidJob(
                f"{KEYS_VARIABLE} is set, and cryptography is missing: pip install 'pagemill[encryption]'"
            ) from None
        self._cipher = AESGCM(secret)
        self._nonces = hmac.digest(secret, b"pagemill-nonce-1", hashlib.sha256)

    def encrypt(self, plain: bytes, bound: bytes) -> bytes:
        message = len(bound).to_bytes(4, "big") + bound + plain
        nonce = hmac.digest(self._nonces, message, hashlib.sha256)[:_NONCE_BYTES]
        return nonce + self._cipher.encrypt(nonce, plain, bound)

    def decrypt(self, data: bytes, bound: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], bound)
        except (InvalidTag, ValueError):
            raise SealedError("the stored value is not what was written for this job") from None


def opened(stored: bytes, kind: Kind, name: str) -> bytes:
    """Return the plaintext of a stored value. The keys of the environment are read only if they matter.

    Raises SealedError, and InvalidJob for invalid keys.
    """
    if stored.startswith(_OPENING) or os.environ.get(REQUIRED_VARIABLE):
        return ring().open(stored, kind, name)
    return stored


def opened_metadata(stored: bytes | None, name: str) -> dict[str, Any] | None:
    """Return a job's metadata; None if there is none, or if it cannot be read here."""
    try:
        value: dict[str, Any] | None = json.loads(opened(stored, "metadata", name)) if stored else None
    except SealedError:
        return None
    return value


def ring() -> KeyRing:
    """Return the keys that the environment currently names. Raises InvalidJob for invalid keys."""
    return _ring(
        os.environ.get(KEYS_VARIABLE, ""),
        os.environ.get(COMMAND_VARIABLE, ""),
        os.environ.get(REQUIRED_VARIABLE, ""),
    )


@lru_cache(maxsize=8)
def _ring(text: str, command: str, required: str) -> KeyRing:
    if command and not text:
        text = _said_by(command)
    secrets: dict[str, bytes] = {}
    for part in filter(None, re.split(r"[,\s]+", text)):
        found = _KEY.fullmatch(part)
        try:
            secret = base64.b64decode(found[2].replace("-", "+").replace("_", "/")) if found else b""
        except binascii.Error:
            secret = b""
        if found is None or len(secret) != KEY_BYTES:
            raise InvalidJob(
                f"{KEYS_VARIABLE} has keys as <id>:<base64 of {KEY_BYTES} bytes>, separated by commas; number "
                f"{len(secrets) + 1} is invalid"
            )
        secrets[found[1]] = secret
    if required and not secrets:
        raise InvalidJob(f"{REQUIRED_VARIABLE} is set, and {KEYS_VARIABLE} has no key")
    return KeyRing(secrets, is_required=bool(required))


def _said_by(command: str) -> str:
    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, timeout=COMMAND_S, check=True, text=True
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # Its output must never be included.
        raise InvalidJob(f"the command of {COMMAND_VARIABLE} fails with {type(error).__name__}") from None
    if not done.stdout.strip():
        raise InvalidJob(f"the command of {COMMAND_VARIABLE} printed no key")
    return done.stdout


def _bound(kind: Kind, name: str) -> bytes:
    return f"pagemill-1\0{kind}\0{name}".encode()
