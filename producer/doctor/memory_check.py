"""Check of the server's memory: the free memory for jobs, and the kinds of data that use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from pagemill.producer.doctor.finding import Finding
from pagemill.producer.wire.calls import memory, registry
from pagemill.producer.wire.calls.memory import Kind, MemoryUse
from pagemill.producer.wire.schema.errors import AccessDenied, QueueFull, RedisRefused, RedisUnavailable
from pagemill.producer.wire.server.transport import SyncTransport


def memory_finding(client: redis.Redis, queue: str, info: Mapping[str, Any]) -> Finding:
    """Compare the memory in use with the queue's limit; `info` is the reply to INFO."""
    if not int(info.get("maxmemory", 0)):
        system = int(info.get("total_system_memory", 0))
        share = f" of the machine's {_gib(system)}" if system else ""
        used = _gib(int(info.get("used_memory", 0)))
        return Finding(
            "memory", "note", f"{used} in use{share}; no maxmemory, so a full queue takes the machine's memory",
            "set maxmemory: new jobs are rejected before the limit, running jobs still end",
        )  # fmt: skip
    run = SyncTransport(client).run
    try:
        use = run(registry.stats_page(queue)).totals.memory
        shares = memory.shares(run, queue) if use.is_near else {}
    except (AccessDenied, QueueFull, RedisRefused, RedisUnavailable):
        client.ping()  # a server that has disconnected did not reject the scripts
        return Finding("memory", "note", "the server does not report what holds its memory")
    message = in_words(use)
    if not use.is_near:
        return Finding("memory", "ok", message)
    message += f"; {held_by(shares)}" if shares else ""
    return Finding("memory", "error" if use.is_refusing else "warning", message, remedy(queue, shares))


def held_by(shares: Mapping[Kind, float]) -> str:
    """Return a description of the kinds of data that use most of the memory."""
    most = sorted(shares, key=lambda kind: -shares[kind])[:3]
    named = ", ".join(
        f"{kind.replace('_', ' ')} {shares[kind]:.0%}" for kind in most if shares[kind] >= 0.005
    )
    return f"about {named}"


def remedy(queue: str, shares: Mapping[Kind, float]) -> str:
    """Return the suggested command."""
    kind = memory.largest(shares)
    return memory.REMEDIES[kind].format(queue=queue) if kind else "redis-cli --memkeys"


def in_words(use: MemoryUse) -> str:
    """Return one line about the memory in use, also for a server without a limit."""
    if not use.most:
        return "no maxmemory"
    taken = f"jobs are taken up to {use.share:.0%}" + ("; new jobs are rejected" if use.is_refusing else "")
    return f"{use.used / use.most:.0%} of maxmemory ({_gib(use.most)}) in use, {taken}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
