"""Rounds: the same requests through each way alternately, and the results of each."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.gateway.bare import Alone
from benchmarks.gateway.clients import Ask
from benchmarks.gateway.processes import Processors, Server

Run = Callable[[list[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    ask: Ask
    processors: Processors
    server: Server | None = None
    """The server, for a streaming way."""

    @property
    def is_streamed(self) -> bool:
        return self.server is not None


@dataclass(frozen=True, slots=True)
class Load:
    """Up to `at_once` concurrent requests, or `rate` requests per second, at moments determined by a seed."""

    at_once: int
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.at_once} at once" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Figures:
    """One way under one load, in milliseconds per request."""

    way: str
    load: str
    requests_per_s: float
    tokens_per_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    first_token_ms: float
    first_token_p99_ms: float
    is_streamed: bool
    per_token_ms: float | None
    """After the first token; None if not measured."""
    cpu_ms: dict[str, float] = field(default_factory=dict)
    """CPU time by part, per request."""
    bare: Alone | None = None
    """The bare engine in the same round."""

    @property
    def share_of_bare(self) -> float | None:
        return None if self.bare is None else self.tokens_per_s / self.bare.tokens_per_s


async def measure(way: Way, load: Load, prompts: Sequence[list[int]], max_tokens: int) -> Figures:
    took: list[float] = []
    first: list[float] = []

    async def run(prompt: list[int]) -> None:
        began = time.perf_counter()
        first.append(await way.ask(prompt))
        took.append(time.perf_counter() - began)

    cpu = way.processors.read()
    began = time.perf_counter()
    if load.rate is None:
        await _at_once(load.at_once, prompts, run)
    else:
        await _at_rate(load.rate, prompts, run)
    elapsed = time.perf_counter() - began
    cpu = {name: seconds - cpu[name] for name, seconds in way.processors.read().items()}
    ordered = sorted(took)
    later = (statistics.fmean(took) - statistics.fmean(first)) / max(1, max_tokens - 1)
    return Figures(
        way=way.name,
        load=load.name,
        requests_per_s=len(prompts) / elapsed,
        tokens_per_s=len(prompts) * max_tokens / elapsed,
        mean_ms=1000 * statistics.fmean(took),
        p50_ms=1000 * _part(ordered, 0.5),
        p99_ms=1000 * _part(ordered, 0.99),
        first_token_ms=1000 * statistics.fmean(first),
        first_token_p99_ms=1000 * _part(sorted(first), 0.99),
        is_streamed=way.is_streamed,
        per_token_ms=1000 * later if way.is_streamed else None,
        cpu_ms={name: 1000 * seconds / len(prompts) for name, seconds in cpu.items()},
    )


async def _at_once(count: int, prompts: Sequence[list[int]], run: Run) -> None:
    left = iter(prompts)

    async def client() -> None:
        for prompt in left:
            await run(prompt)

    await asyncio.gather(*(client() for _ in range(count)))


async def _at_rate(rate: float, prompts: Sequence[list[int]], run: Run) -> None:
    rng = random.Random(f"arrivals {rate}")
    due, tasks = time.perf_counter(), []
    for prompt in prompts:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(run(prompt)))
        due += rng.expovariate(rate)
    await asyncio.gather(*tasks)


def _part(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median_round(rounds: Sequence[Figures]) -> Figures:
    return sorted(rounds, key=lambda row: row.mean_ms)[len(rounds) // 2]
