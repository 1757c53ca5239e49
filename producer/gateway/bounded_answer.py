"""The time that Redis has to answer a request's calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pagemill.producer.wire.schema.errors import RedisUnavailable

ANSWER_S = 4.0
"""Seconds until a request whose calls are not answered gets a 503, so that its client can retry."""


@contextlib.asynccontextmanager
async def bounded_answer() -> AsyncIterator[None]:
    """Raise RedisUnavailable where the body, which calls Redis, takes longer than `ANSWER_S`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except TimeoutError:
        raise RedisUnavailable(f"Redis has not answered for {ANSWER_S:.0f} s") from None
