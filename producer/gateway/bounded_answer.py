"""The time that Redis has to answer a request's calls."""

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
    """Raise RedisUnavailable where the body, which calls Redis, takes longer than `ANSWER_S`.

    A body of many calls calls what it is given after each, and has that time again.
    """
    try:
        async with asyncio.timeout(ANSWER_S) as bound:
            yield lambda: bound.reschedule(asyncio.get_running_loop().time() + ANSWER_S)
    except TimeoutError:
        raise RedisUnavailable(f"Redis has not answered for {ANSWER_S:.0f} s") from None


def noting_answers(flow: Flow[T], answered: Callable[[], None]) -> Flow[T]:
    """Return the flow as one that calls `answered` after each of its effects."""
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
