"""Checks of the Redis server: whether it keeps its data, and supports the required commands."""

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
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import AccessDenied, QueueFull, RedisRefused, RedisUnavailable
from pagemill.producer.wire.server.transport import SyncTransport, wrap_errors

OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
NEWEST_TESTED = {"redis": (8, 99), "valkey": (9, 99)}
SKEW_WARNING_S = 1.0
SKEW_ERROR_S = 30.0
SLOW_ROUND_TRIP_S = 0.05
SLOW_WRITE_S = 0.5

CHECKED_REPLAY = {"redis": ((7, 0), (8, 6)), "valkey": ((7, 2), (9, 1, 2))}
"""The first version that checks permissions when it replays an append-only file, and the first that no longer does."""
REPLAYED_COMMANDS = (
    "DEL", "HDEL", "HINCRBY", "HSET", "HSETNX", "LPUSH", "LREM", "LSET", "LTRIM", "MSET", "PEXPIRE", "PEXPIREAT",
    "RPUSH", "SADD", "SELECT", "SET", "SPOP", "SREM", "UNLINK", "ZADD", "ZINCRBY", "ZREM", "ZREMRANGEBYSCORE",
)  # fmt: skip
"""The commands in the scripts' transactions in an append-only file."""
LOCKED_DEFAULT_USER = "off ~* &* +@all"
"""This user cannot log in, and the server replays every transaction."""

Info = Mapping[str, Any]


def server_findings(client: redis.Redis, queue: str) -> list[Finding]:
    """Run all checks of the server; the check that scripts run comes last.

    Raises RedisUnavailable when it does not answer.
    """
    with wrap_errors():
        client.ping()
        findings = [*_info_findings(client, queue), clock_skew(client), write_latency(client, queue)]
        findings.append(scripts_run(client, queue))
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
    yield default_user(client, queue, info)
    yield memory_finding(client, queue, info)
    yield fsync(info, _config(client, "appendfsync"))


def version(info: Info) -> Finding:
    """Check for Redis 6.2 to 8, or Valkey 7.2 to 9."""
    kind, name, numbers = _server(info)
    if not numbers:
        return Finding("version", "note", f"the server does not report its version ({name})")
    if numbers < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        return Finding("version", "error", f"{name} is too old", f"use {kind.capitalize()} {oldest} or newer")
    if numbers > NEWEST_TESTED[kind]:
        return Finding("version", "warning", f"{name} is newer than what has been tested")
    return Finding("version", "ok", name)


def _server(info: Info) -> tuple[str, str, tuple[int, ...]]:
    """Return the kind of server (a key of OLDEST), its name with the version, and the version's first three numbers."""
    kind = "valkey" if "valkey_version" in info else "redis"
    text = str(info.get(f"{kind}_version") or "?")
    return kind, f"{kind.capitalize()} {text}", tuple(map(int, re.findall(r"\d+", text)[:3]))


def role(info: Info) -> Finding:
    if info.get("role", "master") != "master":
        return Finding(
            "role",
            "error",
            "this server is a replica and accepts no jobs",
            "connect to the master, or through Sentinel",
        )
    replicas = int(info.get("connected_slaves", 0))
    return Finding("role", "ok", f"master with {replicas} replica{'' if replicas == 1 else 's'}")


def eviction_policy(info: Info) -> Finding:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return Finding(
            "eviction", "note", "the server does not report its maxmemory-policy; it must be noeviction"
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
        return Finding("append-only file", "note", "the server does not report whether it has one")
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
            "use a faster or a dedicated disk for the server",
        )  # fmt: skip
    return Finding("append-only file", "ok", "on, and the last write went well")


def default_user(client: redis.Redis, queue: str, info: Info) -> Finding:
    """Check that a restart restores the queue, regardless of the default user's permissions.

    In an append-only file the writes of a script are a transaction. Some versions replay transactions with the
    permissions of the default user, and drop the commands that it must not run.
    """
    kind, name, numbers = _server(info)
    if info.get("aof_enabled") == 0:
        return Finding("default user", "ok", "its permissions affect only servers with an append-only file")
    first, fixed = CHECKED_REPLAY[kind]
    if numbers and not first <= numbers < fixed:
        return Finding("default user", "ok", f"{name} replays its append-only file without permission checks")
    cause = f"{name} replays its append-only file with the permissions of the default user"
    line = f"user default {LOCKED_DEFAULT_USER}"
    try:
        refused = [command for command in REPLAYED_COMMANDS if not _default_user_may(client, command, queue)]
    except exceptions.ResponseError as error:
        return Finding(
            "default user", "note", f"{cause}, which could not be checked ({error})",
            f"run doctor as an administrator, or compare ACL GETUSER default with the ACL line {line}",
        )  # fmt: skip
    if refused:
        return Finding(
            "default user",
            "error",
            f"{cause}, which cannot run {refused[0]} on the queue's keys: a restart loses jobs",
            f"ACL SETUSER default {LOCKED_DEFAULT_USER}, then ACL SAVE (or CONFIG REWRITE); in the ACL file: {line}",
        )
    return Finding("default user", "ok", f"{cause}, which are sufficient")


def _default_user_may(client: redis.Redis, command: str, queue: str) -> bool:
    """Check on the server, without running it, whether the default user may run a command on the queue's keys."""
    key = f"{keys.prefix(queue)}doctor"
    arguments = ("0",) if command == "SELECT" else (key, key, key)
    return client.execute_command("ACL", "DRYRUN", "default", command, *arguments) in (b"OK", "OK")


def fsync(info: Info, policy: str | None) -> Finding:
    if not info.get("aof_enabled"):
        return Finding("fsync", "note", "of no concern without an append-only file")
    match policy:
        case None:
            return Finding("fsync", "note", "CONFIG is denied: appendfsync is unknown")
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
    """Compare clocks. Leases only use the server's clock; deadlines of producers in unix time do not."""
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
    message = (
        f"the server's is {abs(skew) * 1000:.0f} ms {'ahead of' if skew >= 0 else 'behind'} this machine's"
    )
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


def write_latency(client: redis.Redis, queue: str) -> Finding:
    """Time three writes of a key that expires immediately.

    Under `appendfsync always` the server answers after the fsync. Its count of late fsyncs then stays 0, even if the
    disk is slow.
    """
    slowest = 0.0
    try:
        for _ in range(3):
            began = time.monotonic()
            client.set(f"{keys.prefix(queue)}doctor", b"", px=1)
            slowest = max(slowest, time.monotonic() - began)
    except exceptions.NoPermissionError as error:
        return Finding("write latency", "note", f"this user cannot write the key of the check: {error}")
    except exceptions.ResponseError as error:
        return Finding("write latency", "error", f"the server rejects writes: {error}", _remedy(str(error)))
    message = f"the slowest of 3 writes took {slowest * 1000:.0f} ms"
    if slowest > SLOW_WRITE_S:
        remedy = "the server's disk or the network is slow: look at its fsyncs (LATENCY LATEST), give it a faster disk"
        return Finding("write latency", "warning", message, remedy)
    return Finding("write latency", "ok", message)


def _remedy(rejection: str) -> str:
    """Return the remedy for a rejected write."""
    remedies = {
        "NOREPLICAS": "too few replicas are connected for min-replicas-to-write: repair them, or lower it (CONFIG SET)",
        "MISCONF": "the server cannot save: check its disk and its log",
        "read only replica": "use the address of the primary",
        "used memory > 'maxmemory'": "raise maxmemory, or delete what is not needed",
    }
    return next(
        (remedy for words, remedy in remedies.items() if words in rejection),
        "submissions fail until this is fixed",
    )


def scripts_run(client: redis.Redis, queue: str) -> Finding:
    try:
        SyncTransport(client).run(registry.stats_page(queue))
    except (exceptions.ResponseError, AccessDenied, QueueFull, RedisRefused, RedisUnavailable) as error:
        client.ping()  # a server that has disconnected did not reject the scripts
        return Finding(
            "scripts", "error", f"the server rejects Pagemill's scripts: {error}",
            "the user needs EVALSHA and SCRIPT LOAD on the keys of its queues",
        )  # fmt: skip
    return Finding("scripts", "ok", "they run")


def _config(client: redis.Redis, name: str) -> str | None:
    """Return a setting; None if CONFIG is not permitted, as on managed servers."""
    try:
        value = client.config_get(name).get(name)
    except exceptions.ResponseError:
        return None
    return value.decode() if isinstance(value, bytes) else value
