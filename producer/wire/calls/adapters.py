"""Commands to live workers, about adapters or pulling, and the replies, as transitions.

Each worker takes commands from its own list one by one; replies are collected by the command's id. Both expire.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import WireModel
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.scripts import Call

COMMAND_TTL_MS = 60_000
"""A command that no worker has taken by then is deleted."""
MAX_SOURCE = 4096


class WorkerCommand(WireModel):
    """A command to a worker. One with unknown fields is rejected, since they might restrict it."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(min_length=1, max_length=64)]
    action: Literal["add", "remove", "list", "drain", "pause", "resume"]
    """The first three are about adapters; the others control whether the worker pulls."""
    name: str = ""
    source: Annotated[str, Field(max_length=MAX_SOURCE)] = ""
    """A folder on the worker's machine."""
    sent_at: float = 0.0
    """Unix seconds."""


class AdapterInfo(WireModel):
    """An adapter of a worker."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    source: str


class AdapterAnswer(WireModel):
    """A worker's answer."""

    error: str | None = None
    """Why the command failed; None: it succeeded."""
    adapters: tuple[AdapterInfo, ...] = ()
    """The worker's current adapters."""


def send_command(queue: str, worker_ids: Sequence[str], command: WorkerCommand, signing: Keys) -> Call[int]:
    """Send a command to workers. Returns the number that received it; 0 if they had received it before."""
    args: list[str | bytes | int] = [command.id, COMMAND_TTL_MS]
    body = command.model_copy(update={"sent_at": time.time()}).model_dump_json().encode()
    for worker_id in worker_ids:
        args += [worker_id, signing.sign_command(body, queue=queue, worker_id=worker_id)]
    return Call("adapter_ask", (keys.prefix(queue),), tuple(args), int)


def answer(queue: str, command_id: str, worker_id: str, given: AdapterAnswer) -> Call[None]:
    """Store a worker's answer."""
    return Call(
        "adapter_answers",
        (keys.prefix(queue),),
        (command_id, worker_id, given.model_dump_json()),
        lambda reply: None,
    )


def answers(queue: str, command_id: str) -> Call[dict[str, AdapterAnswer]]:
    """Return the answers so far, by worker."""
    return Call("adapter_answers", (keys.prefix(queue),), (command_id,), _answers)


def _answers(reply: list[Any] | dict[Any, Any]) -> dict[str, AdapterAnswer]:
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {worker.decode(): AdapterAnswer.model_validate_json(text) for worker, text in pairs}
