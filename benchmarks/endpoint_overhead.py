"""The cost of the queue before an endpoint: direct clients, compared with jobs of a worker with `--engine`.

`python -m benchmarks.endpoint_overhead [--url http://host:8000/v1 --served-model-name NAME]`. `--concurrency`
clients send requests sequentially, as streams; both sides run their passes alternately. Without `--url` the
endpoint is a local process that writes tokens at a fixed rate. The ratio is then also valid on a busy
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.engines.queued import serving

if TYPE_CHECKING:
    from aiohttp import web

    from pagemill import AsyncProducer
    from pagemill.worker.engine_host.endpoint.connection import Connection

SHARE_GOAL = 0.95
FIRST_TOKEN_GOAL_S = 0.030
FAKE = "fixed-rate"
Ask = Callable[[int], Awaitable[tuple[float, int]]]
"""Send a request by its number; return the seconds to its first token, and its number of tokens."""


@dataclass
class Pass:
    """One pass over all requests."""

    seconds: float = 0.0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def p50(self) -> float:
        return statistics.median(self.first_token_s)


async def timed(ask: Ask, requests: int, concurrency: int) -> Pass:
    """Send all requests, with this concurrency."""
    made, numbers = Pass(), iter(range(requests))

    async def client() -> None:
        for number in numbers:
            first, tokens = await ask(number)
            made.first_token_s.append(first)
            made.tokens += tokens

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    made.seconds = time.perf_counter() - began
    return made


def prompt_of(number: int) -> str:
    return f"Question {number}: what is a queue good for?"


def asks_directly(connection: Connection, model: str, max_tokens: int) -> Ask:
    async def ask(number: int) -> tuple[float, int]:
        body = {"model": model, "prompt": prompt_of(number), "max_tokens": max_tokens, "stream": True,
                "stream_options": {"include_usage": True}, "temperature": 0.0, "seed": 1}  # fmt: skip
        began, first, tokens = time.perf_counter(), 0.0, 0
        async for event in connection.events("/completions", body):
            if not first and any(choice.get("text") for choice in event["choices"]):
                first = time.perf_counter() - began
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first, tokens

    return ask


def asks_queue(producer: AsyncProducer, model: str, max_tokens: int) -> Ask:
    async def ask(number: int) -> tuple[float, int]:
        began, first = time.perf_counter(), 0.0
        handle = await producer.submit(
            prompt=prompt_of(number), model=model, max_tokens=max_tokens, stream=True, temperature=0.0, seed=1
        )
        async for event in handle.stream():
            if not first and event.text:
                first = time.perf_counter() - began
        return first, (await handle.result(timeout=60)).usage.completion_tokens

    return ask


async def measure(given: argparse.Namespace, url: str, redis_url: str, queue: str) -> list[tuple[Pass, Pass]]:
    """Return the passes of each round, directly and through the queue; one more round before them warms up."""
    from pagemill import AsyncProducer
    from pagemill.worker.engine_host.endpoint.connection import Connection

    name, rounds = given.served_model_name, []
    async with Connection(url) as connection, AsyncProducer(redis_url, queue=queue) as producer:
        sides = asks_directly(connection, name, given.tokens), asks_queue(producer, name, given.tokens)
        for number in range(given.rounds + 1):
            size = given.requests if number else given.concurrency
            direct, queued = [await timed(ask, size, given.concurrency) for ask in sides]
            if direct.tokens != queued.tokens:
                raise RuntimeError(f"{direct.tokens} tokens directly, and {queued.tokens} through the queue")
            if number:
                rounds.append((direct, queued))
    return rounds


@contextlib.contextmanager
def fixed_rate(tokens_per_s: float) -> Iterator[str]:
    """Run the endpoint without a model; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "benchmarks.endpoint_overhead",
               "--serve", str(port), "--rate", str(tokens_per_s)]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def serve(port: int, tokens_per_s: float) -> None:
    """Write tokens at a fixed rate in each stream: a late token does not delay later ones."""
    from aiohttp import web

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": FAKE, "owned_by": "benchmark", "max_model_len": 8192}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        most = body.get("max_tokens", 1)
        usage = {"prompt_tokens": 12, "completion_tokens": most}
        if not body.get("stream"):
            choice = {"index": 0, "text": "word", "finish_reason": "length"}
            return web.json_response({"model": FAKE, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        began = time.perf_counter()
        for number in range(1, most + 1):
            await asyncio.sleep(began + number / tokens_per_s - time.perf_counter())
            choice = {"index": 0, "text": "word ", "finish_reason": "length" if number == most else None}
            await _event(response, {"model": FAKE, "choices": [choice]})
        await _event(response, {"model": FAKE, "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def summary(rounds: list[tuple[Pass, Pass]]) -> dict[str, Any]:
    """Return the results by round, and their medians."""
    shares = [queued.rate / direct.rate for direct, queued in rounds]
    added = [queued.p50 - direct.p50 for direct, queued in rounds]
    return {
        "tokens_per_second": {
            "direct": [direct.rate for direct, _ in rounds],
            "queued": [queued.rate for _, queued in rounds],
        },
        "first_token_p50_s": {
            "direct": [direct.p50 for direct, _ in rounds],
            "queued": [queued.p50 for _, queued in rounds],
        },
        "share_of_direct": statistics.median(shares),
        "first_token_added_p50_s": statistics.median(added),
        "meets_goals": statistics.median(shares) >= SHARE_GOAL
        and statistics.median(added) <= FIRST_TOKEN_GOAL_S,
    }


def main() -> int:
    parser = report.parser(__doc__, model=False)
    parser.add_argument("--url", help="the endpoint, up to /v1; default: one at a fixed rate")
    parser.add_argument("--served-model-name", default=FAKE, help="the model that the endpoint serves")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=48, help="of each pass")
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument(
        "--rate", type=float, default=40.0, help="tokens per second of each stream without --url"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.rate)
        return 0
    file = report.Report("endpoint-overhead", "cost of the queue before an endpoint", given)
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(fixed_rate(given.rate))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-benchmark-")))
        settings = {"engine_url": url, "served_model_name": given.served_model_name,
                    "max_num_seqs": given.concurrency}  # fmt: skip
        log = stack.enter_context((folder / "worker.log").open("wb"))
        redis_url, producer, _ = stack.enter_context(serving(settings, folder, log))
        figures = summary(asyncio.run(measure(given, url, redis_url, producer.queue)))
    file.write(figures)
    print(f"tokens/s of the endpoint's own: {figures['share_of_direct']:.1%} (goal: {SHARE_GOAL:.0%})")
    print(f"first token later by (p50): {figures['first_token_added_p50_s'] * 1000:.1f} ms (goal: 30 ms)")
    print(f"written to {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
