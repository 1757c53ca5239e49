"""A time limit for Redis to answer the calls of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from pagemill.producer.client.effects import Flow, T
from pagemill.producer.wire.schema.errors import RedisUnavailable

ANSWER_S = 4.0
"""Seconds until a request whose calls are not answered gets a 503, so that its client can retry."""


@contextlib.asynccontextmanager
async def bounded_answer() -> AsyncIterator[Callable[[], None]]:
    """Raise RedisUnavailable if the body, which calls Redis, takes longer than `ANSWER_S`.

    A body with many calls calls the yielded function after each, which restarts the time.
    """
    try:
        async with asyncio.timeout(ANSWER_S) as bound:
            yield lambda: bound.reschedule(asyncio.get_running_loop().time() + ANSWER_S)
    except TimeoutError:
        raise RedisUnavailable(f"Redis has not answered for {ANSWER_S:.0f} s") from None


def noting_answers(flow: Flow[T], answered: Callable[[], None]) -> Flow[T]:
    """Return a flow that calls `answered` after each effect of the given flow."""
    try:
        effect = next(flow)
        while True:
            try:
                value = yield effect
            except Exception as error:
                effect = flow.throw(error)
            else:
                answered()
                effect = flow.send(value)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        flow.close()
