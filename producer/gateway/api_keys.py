"""API keys: a file of hashes with each key's tenant, priority and rate.

    {"keys": [{"name": "shop", "sha256": "<64 hex digits>", "tenant": "shop", "priority": "high",
               "rate": 20, "burst": 40, "models": ["smollm2"], "disabled": false, "operator": false}],
     "webhooks": [{"name": "shop", "tenant": "shop", "url": "https://shop.example/events", "secret": "whsec_..."}]}

A key is 32 random bytes, so its plain SHA-256 reveals nothing about it, and the timing of a lookup by hash
does not reveal how close a guess was. The file is reloaded when it changes; an invalid file is logged and the
previous keys stay in effect.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from pagemill.producer.gateway.errors import ApiError
from pagemill.producer.wire.calls.gateway.rates import Rate
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.webhook_url import WebhookUrl

logger = logging.getLogger(__name__)

KEY_PREFIX = "pm-"
LOOK_EVERY_S = 1.0
_Tenant = Annotated[str, StringConstraints(strict=True, pattern=f"^{keys.TENANT_PATTERN.pattern}$")]
_Name = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
_Digest = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]


def _check_url(url: str) -> str:
    WebhookUrl.parse(url)
    return url


class KeyFileError(Exception):
    """The key file is invalid; the message contains the location."""


class ApiKey(BaseModel):
    """The settings of a key; the key itself is not stored."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: _Name
    sha256: _Digest
    tenant: _Tenant = "default"
    priority: Literal["high", "normal", "low"] = "normal"
    rate: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = None
    """Requests per second, over all gateways; None: unlimited."""
    burst: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum requests together; None: those of one second."""
    models: tuple[str, ...] | None = None
    """Models that the key may use; None: all."""
    disabled: bool = False
    operator: bool = False
    """On the jobs page, can see and stop the jobs of every tenant."""

    def bucket(self) -> Rate | None:
        if self.rate is None:
            return None
        return Rate(self.rate, self.burst if self.burst is not None else max(1, round(self.rate)))

    @property
    def counted_as(self) -> str | None:
        """The name in the ledger; None on a gateway without keys."""
        return None if self is EVERYBODY else self.name

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


EVERYBODY = ApiKey(name="everybody", sha256="0" * 64)
"""The caller of a gateway without keys."""


Event = Literal[
    "response.completed", "response.incomplete", "response.failed", "response.cancelled", "batch.completed",
    "batch.failed", "batch.expired",
]  # fmt: skip
MAX_WEBHOOKS = 8
"""Maximum per tenant."""


class Webhook(BaseModel):
    """The destination of events of a tenant's background responses and batches."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: _Name
    url: Annotated[str, Field(repr=False), AfterValidator(_check_url)]
    secret: Annotated[
        str, Field(repr=False), StringConstraints(strict=True, pattern=r"^whsec_(?:[A-Za-z0-9+/]{4}){6,32}$")
    ]
    """The key that signs events: `whsec_` and the base64 of 18 to 96 bytes, a multiple of 3."""
    tenant: _Tenant = "default"
    events: Annotated[tuple[Event, ...], Field(min_length=1)] = get_args(Event)
    allow_private: bool = False
    """Whether the host may have a private address."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    schema_address: Annotated[str, StringConstraints(max_length=2048)] | None = Field(None, alias="$schema")
    """The address of the file's JSON schema, for editors; ignored here."""
    keys: tuple[ApiKey, ...]
    webhooks: tuple[Webhook, ...] = ()

    @model_validator(mode="after")
    def _each_once(self) -> _KeyFile:
        for what, found in (("name", [k.name for k in self.keys]), ("key", [k.sha256 for k in self.keys])):
            if len(set(found)) != len(found):
                raise ValueError(f"a {what} is there twice")
        tenants = Counter(webhook.tenant for webhook in self.webhooks)
        if len({webhook.name for webhook in self.webhooks}) != len(self.webhooks):
            raise ValueError("a webhook's name is there twice")
        if max(tenants.values(), default=0) > MAX_WEBHOOKS:
            raise ValueError(f"a tenant has more than {MAX_WEBHOOKS} webhooks")
        return self


def new_key() -> tuple[str, str]:
    """Return a new key to give out, and its hash for the file."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, digest(key)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Return the file's keys by their hash. Raises KeyFileError."""
    return _by_hash(_read(path))


def _by_hash(file: _KeyFile) -> dict[str, ApiKey]:
    return {key.sha256: key for key in file.keys}


def _read(path: Path) -> _KeyFile:
    try:
        return _KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise KeyFileError(f"{path}: {place}: {first['msg']}") from None


class ApiKeys:
    """The keys of a gateway; without a file, access is open. Raises KeyFileError."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen = self._stamp()
        self._file = _read(path) if path is not None else _KeyFile.model_validate({"keys": ()})
        self._keys = _by_hash(self._file)
        self._next_look = 0.0

    @property
    def is_open(self) -> bool:
        """True if requests do not need a key."""
        return self._path is None

    @property
    def has_webhooks(self) -> bool:
        self._reload()
        return bool(self._file.webhooks)

    def webhooks(self, tenant: str, event: str | None = None) -> list[Webhook]:
        """Return the tenant's webhooks: all, or those subscribed to the event."""
        return [
            webhook
            for webhook in self._file.webhooks
            if webhook.tenant == tenant and (event is None or event in webhook.events)
        ]

    def identify(self, authorization: str | None) -> ApiKey:
        """Return the request's key. Raises ApiError: 401 if missing or unknown, 403 if disabled."""
        if self._path is None:
            return EVERYBODY
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, "missing_api_key", headers={"www-authenticate": "Bearer"})
        found = self._keys.get(digest(key.strip()))
        if found is None:
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the API key is not known", "invalid_api_key", headers=headers)
        if found.disabled:
            raise ApiError(403, "the API key is disabled", "disabled_api_key")
        return found

    def _reload(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._file = _read(self._path)
            self._keys = _by_hash(self._file)
        except KeyFileError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys read from %s", len(self._keys), self._path)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def add_key(path: Path, key: ApiKey) -> None:
    """Add a key to a file; a new file is readable only by its owner. Raises KeyFileError."""
    before = _read(path) if path.exists() else _KeyFile.model_validate({"keys": ()})
    try:
        after = _KeyFile.model_validate({"keys": (*before.keys, key), "webhooks": before.webhooks})
    except ValidationError as error:
        raise KeyFileError(f"{path}: {error.errors()[0]['msg']}") from None
    rows = [row.model_dump(exclude_defaults=True) for row in after.keys]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, mode), "w") as file:
            heading = {"$schema": before.schema_address} if before.schema_address else {}
            webhooks = [row.model_dump(mode="json", exclude_defaults=True) for row in before.webhooks]
            footing = {"webhooks": webhooks} if webhooks else {}
            json.dump(heading | {"keys": rows} | footing, file, indent=2)
            file.write("\n")
        temporary.replace(path)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
