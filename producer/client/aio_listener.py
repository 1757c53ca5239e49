"""One task per AsyncProducer that receives hints and polls for all waits together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from pagemill.producer.client.listener import IDLE_EXIT_S, RECONNECT_PAUSE_S
from pagemill.producer.client.waiting_room import LEASE_PATIENCE_MS, POLL_CHUNK, Channels, WaitingRoom
from pagemill.producer.wire.calls import reads, transitions
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError, RedisUnavailable
from pagemill.producer.wire.server.transport import AsyncTransport, wrap_errors

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())


class AsyncWatched:
    """Events of a topic, kept until a caller waits for them."""

    def __init__(self, topic: str, room: WaitingRoom, ensure_listener: Callable[[], None]) -> None:
        self._room = room
        self._ensure_listener = ensure_listener
        self._news = asyncio.Event()
        self._waiter = room.enter(topic, self._news.set, stays=True)
        ensure_listener()

    async def wait(self, timeout: float | None) -> None:
        """Return if there has been an event since the last wait, or after the timeout."""
        self._ensure_listener()
        if not self._news.is_set():
            await _set_within(self._news, timeout)
        self._news.clear()

    def close(self) -> None:
        self._room.leave(self._waiter)


async def _set_within(event: asyncio.Event, timeout: float | None) -> None:
    """Wait for the event, which the timeout also sets: this takes a third of the time of `asyncio.timeout`."""
    timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()


class AsyncListener:
    """Like Listener, on the event loop of its first use."""

    def __init__(self, transport: AsyncTransport, queue: str) -> None:
        self._transport = transport
        self._queue = queue
        self._channels = Channels(queue)
        self._room = WaitingRoom()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, topic: str, timeout: float | None, *, polled: bool) -> None:
        """Return when the topic may have an event, or after the timeout."""
        event = asyncio.Event()
        waiter = self._room.enter(topic, event.set, polled=polled)
        try:
            self._ensure_task()
            await _set_within(event, timeout)
        finally:
            self._room.leave(waiter)

    def watch(self, topic: str) -> AsyncWatched:
        """Keep events of the topic."""
        return AsyncWatched(topic, self._room, self._ensure_task)

    def _ensure_task(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="pagemill-listener")

    async def close(self) -> None:
        """Wake all waiters and end the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._room.call_all()

    async def _run(self) -> None:
        while len(self._room):
            try:
                with wrap_errors():
                    await self._listen()
            except RedisUnavailable as error:
                logger.info(
                    "waits continue when Redis is back, next try in %s s: %s", RECONNECT_PAUSE_S, error
                )
                await asyncio.sleep(RECONNECT_PAUSE_S)
            except (PagemillError, redis.RedisError) as error:
                logger.warning(
                    "waits poll, next try to listen in %s s: %s", RECONNECT_PAUSE_S, error, extra=IN_LOOP
                )
                await asyncio.sleep(RECONNECT_PAUSE_S)
            # Hints may have been missed meanwhile.
            self._room.call_all()

    async def _listen(self) -> None:
        async with self._transport.client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(*self._channels.names)
            last_busy = time.monotonic()
            while time.monotonic() - last_busy < IDLE_EXIT_S:
                if len(self._room):
                    last_busy = time.monotonic()
                await self._receive(pubsub)
                await self._poll()

    async def _receive(self, pubsub: Any) -> None:
        timeout = self._room.tick()
        while message := await pubsub.get_message(timeout=timeout):
            self._room.call(self._channels.topics(message))
            timeout = 0.0

    async def _poll(self) -> None:
        if self._room.is_sweep_due():
            await self._transport.run(transitions.sweep(self._queue, patience_ms=LEASE_PATIENCE_MS))
        due = self._room.due()
        for start in range(0, len(due), POLL_CHUNK):
            chunk = due[start : start + POLL_CHUNK]
            ended = await self._transport.run(reads.ends(self._queue, chunk))
            self._room.call([job_id for job_id, has_ended in zip(chunk, ended, strict=True) if has_ended])
