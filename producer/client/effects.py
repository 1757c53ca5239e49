"""The effects that a flow may request of its driver.

A flow is a generator that implements one multi-step operation of the protocol: it yields effects, is sent their
results, and returns a value. Producer drives flows with threads, AsyncProducer with asyncio; neither knows the
protocol, and flows do no I/O.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.store.stub import Reference, Upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a call. Sent back: a value to `Finish` with; the reply is read then."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish a call that was started. Sent back: the parsed reply."""

    pending: Any


@dataclass(frozen=True, slots=True)
class Sync:
    """Wait until everything sent is as durable as the producer's setting requires. Sent back: None."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write files to the store. Sent back: None. Raises StoreError."""

    uploads: Sequence[Upload]


@dataclass(frozen=True, slots=True)
class Read:
    """Read a file of the store. Sent back: its content. Raises StoreError."""

    reference: Reference


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete files of the store; missing ones are not an error. Sent back: None. Raises StoreError."""

    uris: Sequence[str]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Pause for some seconds. Sent back: None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Keep events of the topic for the flow's next `Wait` for it, from now until the flow ends. Sent back: None."""

    topic: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the topic may have an event, up to `timeout` seconds (None: no limit). Sent back: None.

    Topics: a job id (it may have ended), `batch:<id>`, `feed:<job id>`. Events may be missed or spurious, so the flow
    checks afterwards. `polled`: the driver polls for the end of a job, for all waits together.
    """

    topic: str
    timeout: float | None
    polled: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Yield an item to the caller that iterates. Sent back: None, when the next item is requested."""

    item: Any


Effect: TypeAlias = Call[Any] | Begin | Finish | Sync | Write | Read | Delete | Sleep | Watch | Wait | Emit
Flow: TypeAlias = Generator[Effect, Any, T]
