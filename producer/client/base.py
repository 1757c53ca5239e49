"""The base of the two producers: their shared options."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pagemill.producer.client.effects import Flow
from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob, StoreError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.clients import ServerAddress
from pagemill.producer.wire.server.discovery import URL_VARIABLE as REDIS_VARIABLE
from pagemill.producer.wire.server.discovery import with_credentials
from pagemill.producer.wire.server.durability import Durability
from pagemill.producer.wire.store.store import URL_VARIABLE, Store
from pagemill.producer.wire.store.stub import Reference, Upload

HMAC_KEYS_VARIABLE = "PAGEMILL_HMAC_KEYS"

T = TypeVar("T")


class ProducerBase:
    """The options of a producer: server, queue, tenant, signing and durability.

    Args:
        url: the server. Default: PAGEMILL_REDIS_URL, otherwise the embedded server of a local worker.
        queue: name of the queue.
        tenant: owner of the jobs.
        hmac_key: key that signs every job. Default: the first of PAGEMILL_HMAC_KEYS, if set.
        durability: "fsync": a submission returns once it is in the server's append-only file on disk.
        model: model of jobs that name none. Default: the model of the live workers, if they serve exactly one.
        defaults: fields of jobs that do not set them; a `Job` is not changed.
        store: location of payloads and results too large for Redis (docs/storage.md). Default: PAGEMILL_STORE_URL.

    Raises:
        InvalidJob: an option is invalid.
        InvalidAddress: the URL is invalid.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = "default",
        tenant: str = "default",
        hmac_key: str | bytes | None = None,
        durability: Durability = "server",
        model: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        store: str | Store | None = None,
    ) -> None:
        keys.prefix(queue)
        keys.check_name(keys.TENANT_PATTERN, keys.TENANT_RULE, tenant)
        if durability not in get_args(Durability):
            raise InvalidJob(f"durability is one of {', '.join(get_args(Durability))}")
        if given := url or os.environ.get(REDIS_VARIABLE):
            ServerAddress.parse(with_credentials(given))
        self.queue = queue
        self.tenant = tenant
        self.model: str | None = model or (defaults or {}).get("model")
        self._url = url
        self._durability = durability
        fields = {**(defaults or {}), **({} if model is None else {"model": model})}
        if fields:
            Job.parse({"prompt": "x", "model": "m", **fields})
        self.store = Store(store) if isinstance(store, str) else store or Store.from_environment()
        self.preparer = Preparer(queue, tenant, signing_keys(hmac_key), fields, self.store)
        self._init_connection()

    def write_stored(self, uploads: Sequence[Upload]) -> None:
        """Write files to the store.

        Args:
            uploads: names and contents.

        Raises:
            StoreError: the store does not accept them, or none is configured.
        """
        for upload in uploads:
            self._reached_store().write(upload.uri, upload.data)

    def read_stored(self, reference: Reference) -> bytes:
        """Read a file of the store.

        Args:
            reference: the file's name, size and hash.

        Returns:
            The file's content.

        Raises:
            StoreError: the file is missing or was changed, or no store is configured.
        """
        return self._reached_store().read(reference)

    def delete_stored(self, uris: Sequence[str]) -> None:
        """Delete files of the store.

        Args:
            uris: the files' names.

        Raises:
            StoreError: the store does not respond, or none is configured.
        """
        for uri in uris:
            self._reached_store().delete(uri)

    def _reached_store(self) -> Store:
        if self.store is None:
            raise StoreError(
                f"the data is in a store, but no store is configured: set {URL_VARIABLE} or store=",
                "unset",
            )
        return self.store

    def _init_connection(self) -> None:
        """Prepare to connect at first use."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(queue={self.queue!r}, tenant={self.tenant!r})"


class Driver(ProducerBase):
    """The interface of the producer for threads that the rest of this package uses: it drives flows."""

    def run_flow(self, flow: Flow[T]) -> T:
        """Drive a flow that emits nothing, and return its value."""
        raise NotImplementedError

    def iterate_flow(self, flow: Flow[None]) -> Iterator[Any]:
        """Drive a flow, yielding its items as they are requested."""
        raise NotImplementedError


class AsyncDriver(ProducerBase):
    """The same for asyncio."""

    async def run_flow(self, flow: Flow[T]) -> T:
        """Drive a flow that emits nothing, and return its value."""
        raise NotImplementedError

    def iterate_flow(self, flow: Flow[None]) -> AsyncIterator[Any]:
        """Drive a flow, yielding its items as they are requested."""
        raise NotImplementedError


def signing_keys(given: str | bytes | None = None) -> Keys:
    """Return the signing key: the one given, or the first of PAGEMILL_HMAC_KEYS. Raises InvalidJob."""
    if given is not None:
        return Keys([given])
    first = os.environ.get(HMAC_KEYS_VARIABLE, "").split(",")[0].strip()
    return Keys([first] if first else [])
