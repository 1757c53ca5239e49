"""Checks of the Redis server: does it keep its data, and does it support our commands?"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis
from redis import exceptions

from pagemill.producer.doctor.finding import Finding
from pagemill.producer.doctor.memory_check import memory_finding
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.schema.errors import AccessDenied, RedisUnavailable
from pagemill.producer.wire.server.transport import SyncTransport, wrap_errors

OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
NEWEST_TESTED = {"redis": (8, 99), "valkey": (9, 99)}
SKEW_WARNING_S = 1.0
SKEW_ERROR_S = 30.0
SLOW_ROUND_TRIP_S = 0.05

Info = Mapping[str, Any]


def server_findings(client: redis.Redis, queue: str) -> list[Finding]:
    """Run all checks of the server; the check that scripts run comes last.

    Raises RedisUnavailable when it does not answer.
    """
    with wrap_errors():
        client.ping()
        findings = [*_info_findings(client, queue), clock_skew(client), scripts_run(client, queue)]
    return findings


def _info_findings(client: redis.Redis, queue: str) -> Iterator[Finding]:
    try:
        info: Info = client.info("all")
    except exceptions.ResponseError as error:
        yield Finding(
            "server", "note", f"INFO is refused ({error}): version, policy and persistence are unknown"
        )
        return
    checks: list[Callable[[Info], Finding]] = [
        version,
        role,
        eviction_policy,
        evictions,
        append_only_file,
    ]
    for check in checks:
        yield check(info)
    yield memory_finding(client, queue, info)
    yield fsync(info, _config(client, "appendfsync"))


def version(info: Info) -> Finding:
    """Check for Redis 6.2 to 8, or Valkey 7.2 to 9."""
    kind = "valkey" if "valkey_version" in info else "redis"
    text = str(info.get("valkey_version") or info.get("redis_version") or "?")
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    name = f"{kind.capitalize()} {text}"
    if not numbers:
        return Finding("version", "note", f"the server does not say its version ({name})")
    if numbers < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        return Finding("version", "error", f"{name} is too old", f"use {kind.capitalize()} {oldest} or newer")
    if numbers > NEWEST_TESTED[kind]:
        return Finding("version", "warning", f"{name} is newer than what has been tested")
    return Finding("version", "ok", name)


def role(info: Info) -> Finding:
    if info.get("role", "master") != "master":
        return Finding(
            "role",
            "error",
            "this server is a replica: it takes no jobs",
            "connect to the master, or through Sentinel",
        )
    replicas = int(info.get("connected_slaves", 0))
    return Finding("role", "ok", f"master with {replicas} replica{'' if replicas == 1 else 's'}")


def eviction_policy(info: Info) -> Finding:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return Finding(
            "eviction", "note", "the server does not say its maxmemory-policy; it must be noeviction"
        )
    if policy != "noeviction":
        return Finding(
            "eviction", "error", f"maxmemory-policy is {policy}: the server deletes jobs when its memory is full",
            "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file",
        )  # fmt: skip
    return Finding("eviction", "ok", "maxmemory-policy is noeviction")


def evictions(info: Info) -> Finding:
    evicted = int(info.get("evicted_keys", 0))
    if evicted:
        return Finding(
            "evicted keys", "error", f"{evicted} keys have been evicted since the server started: jobs may be lost",
            "set maxmemory-policy noeviction; submit again what is missing",
        )  # fmt: skip
    return Finding("evicted keys", "ok", "none")


def append_only_file(info: Info) -> Finding:
    enabled = info.get("aof_enabled")
    if enabled is None:
        return Finding("append-only file", "note", "the server does not say whether it has one")
    if not enabled:
        return Finding(
            "append-only file", "error", "there is none: when the server crashes, all since its last snapshot is lost",
            "CONFIG SET appendonly yes, and the same in its configuration file",
        )  # fmt: skip
    if info.get("aof_last_write_status", "ok") != "ok":
        return Finding(
            "append-only file",
            "error",
            "the last write to it failed",
            "is the disk full? See the server's log",
        )
    delayed = int(info.get("aof_delayed_fsync", 0))
    if delayed:
        return Finding(
            "append-only file", "warning", f"{delayed} fsyncs were late: the disk is slower than the queue",
            "give the server a faster disk, or one of its own",
        )  # fmt: skip
    return Finding("append-only file", "ok", "on, and the last write went well")


def fsync(info: Info, policy: str | None) -> Finding:
    if not info.get("aof_enabled"):
        return Finding("fsync", "note", "of no concern without an append-only file")
    match policy:
        case None:
            return Finding("fsync", "note", "CONFIG is refused: appendfsync is unknown")
        case "always":
            return Finding("fsync", "ok", "appendfsync is always: a power failure loses nothing")
        case "everysec":
            return Finding(
                "fsync", "ok", "appendfsync is everysec: a power failure may undo about two seconds"
            )
    return Finding(
        "fsync", "warning", f"appendfsync is {policy}: a power failure may undo half a minute",
        "CONFIG SET appendfsync everysec, or always",
    )  # fmt: skip


def clock_skew(client: redis.Redis) -> Finding:
    """Compare clocks. Leases use the server's alone; deadlines that producers give in unix time do not."""
    best: tuple[float, float] | None = None
    for _ in range(5):
        sent = time.time()
        began = time.monotonic()
        seconds, microseconds = client.time()
        took = time.monotonic() - began
        skew = seconds + microseconds / 1e6 - (sent + took / 2)
        if best is None or took < best[0]:
            best = (took, skew)
    assert best is not None
    took, skew = best
    message = f"the server's is {abs(skew) * 1000:.0f} ms {'ahead of' if skew >= 0 else 'behind'} ours"
    message += f" (round trip {took * 1000:.1f} ms)"
    if abs(skew) > SKEW_ERROR_S:
        return Finding(
            "clock", "error", message, "synchronise both clocks (NTP): deadlines and run_at are off by that"
        )
    if abs(skew) > SKEW_WARNING_S:
        return Finding("clock", "warning", message, "synchronise both clocks (NTP)")
    if took > SLOW_ROUND_TRIP_S:
        return Finding("clock", "warning", message, "the way to the server is slow: put workers nearer to it")
    return Finding("clock", "ok", message)


def scripts_run(client: redis.Redis, queue: str) -> Finding:
    try:
        SyncTransport(client).run(registry.stats_page(queue))
    except (exceptions.ResponseError, AccessDenied, RedisUnavailable) as error:
        client.ping()  # a server that has gone away did not refuse the scripts
        return Finding(
            "scripts", "error", f"the server refuses our scripts: {error}",
            "the user needs EVALSHA and SCRIPT LOAD on the keys of its queues",
        )  # fmt: skip
    return Finding("scripts", "ok", "they run")


def _config(client: redis.Redis, name: str) -> str | None:
    """Return a setting; None where CONFIG is refused, as on managed servers."""
    try:
        value = client.config_get(name).get(name)
    except exceptions.ResponseError:
        return None
    return value.decode() if isinstance(value, bytes) else value
