"""The requests, and their transports: direct submission, non-streaming HTTP, or streaming HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from pagemill import AsyncProducer

Ask = Callable[[list[int]], Awaitable[float]]
"""Run a request to completion; return the seconds until its first token."""

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


def direct(producer: AsyncProducer, body: Mapping[str, Any]) -> Ask:
    async def ask(prompt: list[int]) -> float:
        began = time.perf_counter()
        handle = await producer.submit({**body, "prompt_token_ids": prompt})
        await handle.result()
        return time.perf_counter() - began

    return ask


def whole(client: aiohttp.ClientSession, address: str, body: Mapping[str, Any]) -> Ask:
    async def ask(prompt: list[int]) -> float:
        began = time.perf_counter()
        async with client.post(address, json={**body, "prompt": prompt}) as answer:
            answer.raise_for_status()
            await answer.read()
        return time.perf_counter() - began

    return ask


def streamed(client: aiohttp.ClientSession, address: str, body: Mapping[str, Any]) -> Ask:
    """Raises RuntimeError for a stream that ends without all of its tokens.

    Events are not parsed: the client shares the CPU with the measured processes.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}}

    async def ask(prompt: list[int]) -> float:
        began, first, tail = time.perf_counter(), None, b""
        async with client.post(address, json={**body, **options, "prompt": prompt}) as answer:
            answer.raise_for_status()
            async for chunk in answer.content.iter_any():
                if first is None and b"data: {" in tail + chunk:
                    first = time.perf_counter() - began
                tail = (tail + chunk)[-1024:]
        told = _USAGE.findall(tail)
        if first is None or not told or int(told[-1]) != body["max_tokens"]:
            raise RuntimeError(
                f"a stream did not have its {body['max_tokens']} tokens; it ended with {tail!r}"
            )
        return first

    return ask
