"""One thread per Producer that receives hints and polls for all waits together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from pagemill.producer.client.waiting_room import LEASE_PATIENCE_MS, POLL_CHUNK, Channels, WaitingRoom
from pagemill.producer.wire.calls import reads, transitions
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError, RedisUnavailable
from pagemill.producer.wire.server.transport import SyncTransport, wrap_errors

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

IDLE_EXIT_S = 5.0
"""Idle time after which a listener ends; the next wait starts another."""
RECONNECT_PAUSE_S = 0.5


class Watched:
    """Events of a topic, kept until a caller waits for them."""

    def __init__(self, topic: str, room: WaitingRoom, ensure_listener: Callable[[], None]) -> None:
        self._room = room
        self._ensure_listener = ensure_listener
        self._news = threading.Event()
        self._waiter = room.enter(topic, self._news.set, stays=True)
        ensure_listener()

    def wait(self, timeout: float | None) -> None:
        """Return if there has been an event since the last wait, or after the timeout."""
        self._ensure_listener()
        self._news.wait(timeout)
        self._news.clear()

    def close(self) -> None:
        self._room.leave(self._waiter)


class Listener:
    """Wakes waits on pub/sub hints, and polls so that a lost hint causes a delay but never a hang."""

    def __init__(self, transport: SyncTransport, queue: str) -> None:
        self._transport = transport
        self._queue = queue
        self._channels = Channels(queue)
        self._room = WaitingRoom()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def wait(self, topic: str, timeout: float | None, *, polled: bool) -> None:
        """Return when the topic may have an event, or after the timeout."""
        event = threading.Event()
        waiter = self._room.enter(topic, event.set, polled=polled)
        try:
            self._ensure_thread()
            event.wait(timeout)
        finally:
            self._room.leave(waiter)

    def watch(self, topic: str) -> Watched:
        """Keep events of the topic."""
        return Watched(topic, self._room, self._ensure_thread)

    def close(self) -> None:
        """Wake all waiters and end the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._room.call_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="pagemill-listener", daemon=True)
                thread.start()  # a signal handler may raise here
                self._thread = thread

    def _run(self) -> None:
        while not self._has_ended():
            try:
                with wrap_errors():
                    self._listen()
            except RedisUnavailable as error:
                logger.info(
                    "waits continue when Redis is back, next try in %s s: %s", RECONNECT_PAUSE_S, error
                )
                time.sleep(RECONNECT_PAUSE_S)
            except (PagemillError, redis.RedisError) as error:
                logger.warning(
                    "waits poll, next try to listen in %s s: %s", RECONNECT_PAUSE_S, error, extra=IN_LOOP
                )
                time.sleep(RECONNECT_PAUSE_S)
            # Hints may have been missed meanwhile.
            self._room.call_all()

    def _has_ended(self) -> bool:
        # Under the lock, so that a wait either keeps this thread or starts another.
        with self._lock:
            ended = self._closed or len(self._room) == 0
            if ended:
                self._thread = None
            return ended

    def _listen(self) -> None:
        """Receive hints until there has been no wait for a while, or the connection is lost."""
        with self._transport.client.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.subscribe(*self._channels.names)
            last_busy = time.monotonic()
            while not self._closed and time.monotonic() - last_busy < IDLE_EXIT_S:
                if len(self._room):
                    last_busy = time.monotonic()
                self._receive(pubsub)
                self._poll()

    def _receive(self, pubsub: Any) -> None:
        timeout = self._room.tick()
        while message := pubsub.get_message(timeout=timeout):
            self._room.call(self._channels.topics(message))
            timeout = 0.0

    def _poll(self) -> None:
        if self._room.is_sweep_due():
            self._transport.run(transitions.sweep(self._queue, patience_ms=LEASE_PATIENCE_MS))
        due = self._room.due()
        for start in range(0, len(due), POLL_CHUNK):
            chunk = due[start : start + POLL_CHUNK]
            ended = self._transport.run(reads.ends(self._queue, chunk))
            self._room.call([job_id for job_id, has_ended in zip(chunk, ended, strict=True) if has_ended])
