"""What a gateway is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits are per gateway unless they say otherwise; sizes in bytes, times in seconds."""

    redis_url: str | None = None
    queue: str = "default"
    host: str = "127.0.0.1"
    port: int = 8000
    keys_path: Path | None = None
    """Without a file everybody is the tenant `default`."""
    models: tuple[str, ...] = ()
    """Names that are taken though no worker serves them yet, for workers that are started on demand."""

    timeout_s: float = 600.0
    """A request's deadline; a client may ask for an earlier one."""
    max_body_bytes: int = 2 * MIB
    max_stored_bytes: int = 4 * MIB
    """In Redis, for one request with several prompts: each is stored with all of the request's settings."""
    max_in_flight: int = 2_000
    """Requests under way, beyond which a new one is answered 503."""
    max_connections: int = 20_000
    """Beyond them the connection that has waited longest for a request is closed."""
    head_timeout_s: float = 10.0
    """For a request's head, and for the first byte of a new connection."""
    body_timeout_s: float = 30.0
    """For a body that comes slower than `min_body_rate`."""
    min_body_rate: int = 32 << 10
    send_timeout_s: float = 60.0
    """For a client that takes nothing of its answer."""
    ping_s: float = 15.0
    """A stream that has nothing to say sends a comment so often."""
    drain_s: int = 20
    """How long open requests may go on after SIGTERM."""

    max_file_bytes: int = 100 * MIB
    max_tenant_files: int = 1_000
    """Of one tenant, on all gateways together, as the next two."""
    max_tenant_bytes: int = 1024 * MIB
    max_tenant_batches: int = 50
    """Open ones."""
    max_uploads: int = 4
    max_batch_requests: int = 50_000
    file_ttl_s: float = 7 * DAY_S
    max_running_batches: int = 4
    batch_poll_s: float = 1.0
    """How often open batches without a gateway are looked for."""
    batch_lease_s: float = 10.0
