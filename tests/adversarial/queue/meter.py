"""A queue whose every call is measured: commands that the server ran for it, and bytes of the reply."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pagemill.producer.wire.server.scripts import Call
from tests.producer.driving import Queue

T = TypeVar("T")

NOT_OF_SCRIPTS = {"cmdstat_info", "cmdstat_evalsha", "cmdstat_script|load", "cmdstat_script"}

DEAR = {"sweep", "pull", "submit", "cancel", "batch_cancel", "batch_ack", "outbox_claim"}
"""Counted at every call; one in ten calls of other scripts is."""


@dataclass
class Meter:
    """The most expensive call of each script so far. No other client may use the server meanwhile."""

    queue: Queue
    rng: random.Random
    max_commands: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    max_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: int = 0
    killed: list[str] = field(default_factory=list)
    """Scripts during which the server was killed, and the number of earlier calls."""

    def run(self, call: Call[T]) -> T:
        name = call.script
        is_counted = name in DEAR or self.rng.random() < 0.1
        before = self._commands() if is_counted else 0
        raw = self.queue.run(replace(call, parse=_as_it_came))
        if is_counted:
            self.max_commands[name] = max(self.max_commands[name], self._commands() - before)
        self.max_bytes[name] = max(self.max_bytes[name], size_of(raw))
        self.calls += 1
        return call.parse(raw)

    def _commands(self) -> int:
        stats = self.queue.client.info("commandstats")
        return sum(entry["calls"] for name, entry in stats.items() if name not in NOT_OF_SCRIPTS)

    def report(self) -> str:
        return f"killed during {self.killed}\n" + "\n".join(
            f"{name:16} {self.max_commands[name]:6} commands {self.max_bytes[name]:10} bytes"
            for name in sorted(self.max_commands)
        )


def _as_it_came(raw: Any) -> Any:
    return raw


def size_of(reply: Any) -> int:
    """Bytes of a reply, each number counted as 8."""
    if isinstance(reply, list):
        return sum(map(size_of, reply))
    return len(reply) if isinstance(reply, bytes | str) else 8
