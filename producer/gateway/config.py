"""The settings of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pagemill.producer.wire.schema.host_names import HostName
from pagemill.producer.wire.schema.keys import ModelName, QueueName
from pagemill.producer.wire.server.clients import RedisAddress

MIB = 1 << 20
DAY_S = 86_400.0
_Seconds = Annotated[float, Field(ge=0.05, le=DAY_S)]
_Count = Annotated[int, Field(ge=1, le=10**6)]
_Bytes = Annotated[int, Field(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True, kw_only=True, config={"extra": "forbid", "hide_input_in_errors": True})
class GatewayConfig:
    """Limits are per gateway unless they say otherwise; sizes in bytes, times in seconds.

    Raises pydantic's ValidationError for invalid values.
    """

    redis_url: RedisAddress | None = None
    queue: QueueName = "default"
    host: HostName = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    keys_path: Path | None = None
    """Without a file all callers are the tenant `default`."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=2048)] | None = None
    """Where browsers reach this gateway; the workers' live pages link to its page of jobs. None: no link."""
    models: tuple[ModelName, ...] = ()
    """Models accepted before any worker serves them, for workers that are started on demand."""

    separate_reasoning: bool = False
    """Have the thinking of every chat apart. Workers of the release before this one do not take such jobs."""
    timeout_s: _Seconds = 600.0
    """A request's deadline; a client may ask for an earlier one."""
    background_s: _Seconds = DAY_S
    """The deadline of a background response; a client may ask for an earlier one."""
    max_body_bytes: _Bytes = 2 * MIB
    max_image_body_bytes: _Bytes = 64 * MIB
    """Of chats, where `max_body_bytes` limits all but letters, digits, + and /: images in base64 may have more."""
    max_stored_bytes: _Bytes = 4 * MIB
    """Bytes in Redis of a request with several prompts: each is stored with all of the request's settings."""
    max_in_flight: _Count = 2_000
    """Concurrent requests; further ones are answered 503."""
    max_connections: _Count = 20_000
    """Beyond this number the connection that has been idle longest is closed."""
    head_timeout_s: _Seconds = 10.0
    """Timeout for a request's head, and for the first byte of a new connection."""
    body_timeout_s: _Seconds = 30.0
    """Timeout for a body that arrives slower than `min_body_rate`."""
    min_body_rate: _Bytes = 32 << 10
    send_timeout_s: _Seconds = 60.0
    """Timeout for a client that reads nothing of its answer."""
    ping_s: _Seconds = 15.0
    """Interval between the comments that an idle stream sends."""
    drain_s: Annotated[int, Field(ge=0, le=86_400)] = 20
    """Time that open requests get after SIGTERM."""

    max_file_bytes: _Bytes = 100 * MIB
    max_tenant_files: _Count = 1_000
    """Per tenant, across all gateways, like the next two."""
    max_tenant_bytes: _Bytes = 1024 * MIB
    max_tenant_batches: _Count = 50
    """Open batches."""
    max_uploads: _Count = 16
    max_key_uploads: _Count = 4
    """Of them, those of one API key."""
    max_batch_requests: _Count = 50_000
    file_ttl_s: Annotated[float, Field(ge=1.0, le=366 * DAY_S)] = 7 * DAY_S
    max_running_batches: _Count = 4
    unknown_model_s: Annotated[float, Field(ge=0.0, le=DAY_S)] = 30.0
    """Time that a batch's requests for a model unknown to the queue wait while a worker is ready; then they fail."""
    batch_poll_s: _Seconds = 1.0
    """Interval between searches for open batches that no gateway runs."""
    webhook_retry_s: Annotated[float, Field(ge=0.01, le=600.0)] = 5.0
    """Seconds until the second attempt to deliver an event; doubled for each further one."""
    webhook_allow_private: bool = False
    """Whether webhooks that tenants create may have private addresses."""
    batch_lease_s: Annotated[float, Field(ge=0.05, le=600.0)] = 10.0
