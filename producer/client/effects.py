"""What a flow may ask of its driver.

A flow is a generator that holds one multi-step operation of the protocol: it yields effects, is sent what
came of them, and returns its value. Producer drives flows with threads, AsyncProducer with asyncio; neither
knows the protocol, and no flow does any input or output.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from pagemill.producer.wire.server.scripts import Call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begin:
    """Sent back: something to `Finish`. The call is on its way; its reply is read when it is asked for."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """Sent back: the parsed reply of a call that was begun."""

    pending: Any


@dataclass(frozen=True, slots=True)
class Sync:
    """Sent back: None, once everything the server was told is as durable as the producer was asked for."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sent back: None, after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Sent back: None, once there may be news on the topic, or after `timeout` seconds (None: no limit).

    Topics: a job id (it may have ended), `batch:<id>`, `feed:<job id>`. News may be missed or be none, so the
    flow looks for itself afterwards. `polled`: the driver polls for the end of a job, for all waits at once.
    """

    topic: str
    timeout: float | None
    polled: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand an item to whoever iterates. Sent back: None, when the next one is asked for."""

    item: Any


Effect: TypeAlias = Call[Any] | Begin | Finish | Sync | Sleep | Wait | Emit
Flow: TypeAlias = Generator[Effect, Any, T]
