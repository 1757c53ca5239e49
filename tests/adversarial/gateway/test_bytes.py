"""A gateway process with malicious bytes: it survives, serves other clients, and keeps no data."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.adversarial.gateway import raw_requests
from tests.adversarial.gateway.raw_requests import Conversation, conversation, post
from tests.adversarial.gateway.talking import NoHttp, talk
from tests.producer.gateway.serving import Served, gateway_process
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

AT_ONCE = 48
MAX_GROWTH_MB = 150
LIMITS = {
    "head_timeout_s": 1.5, "body_timeout_s": 1.5, "send_timeout_s": 2.0, "timeout_s": 6.0, "ping_s": 0.5,
}  # fmt: skip
REFUSED = range(400, 500)


@dataclass
class Besieged:
    served: Served
    process: psutil.Process
    log: Path
    client: QueueClient
    sockets: int = 0
    memory: int = 0
    log_read: int = 0

    def check(self, said: str) -> None:
        """In the initial state."""
        assert self.process.is_running(), f"the gateway died: {said}\n{self.log.read_text()[-3000:]}"
        assert httpx.get(f"{self.served.url}/healthz", timeout=30).status_code == 200, said
        errors = self._news()
        assert "Traceback" not in errors, f"{said}\n{errors[-3000:]}"

    def _news(self) -> str:
        """Return the log lines since the last call."""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self.log_read)
            news = log.read()
            self.log_read = log.tell()
        return news

    def connections(self) -> int:
        return sum(row.laddr.port == self.served.port for row in self.process.net_connections("tcp"))

    def check_rest(self) -> None:
        """Nothing of any client remains: no socket, no memory, no job."""
        eventually(lambda: self.connections() <= self.sockets, "its sockets to close", 60)
        assert (self.process.memory_info().rss >> 20) - self.memory < MAX_GROWTH_MB
        eventually(lambda: not self.active(), f"no job to be left: {self.active()}", 60)

    def active(self) -> dict[str, int]:
        counts = self.client.stats().counts
        return {state: counts[state] for state in ("queued", "delayed", "running") if counts.get(state)}

    def submitted(self) -> int:
        return sum(self.client.stats().counts.values())


@pytest.fixture(scope="module")
def besieged(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    queue, log = f"q-{uuid.uuid4().hex[:12]}", tmp_path_factory.mktemp("gateway") / "log"
    with (
        QueueClient(valkey_url, queue) as client,
        running_worker(worker_config(valkey_url, queue, model="echo", max_num_seqs=64)),
        gateway_process(valkey_url, queue, log=log, **LIMITS) as (served, process),
    ):
        found = Besieged(served, psutil.Process(process.pid), log, client)
        body = json.dumps({"model": "echo", "prompt": "alive"}).encode()
        eventually(
            lambda: (
                served.ask(post("/v1/completions", body, "application/json", "connection: close"))[9:12]
                == b"200"
            ),
            "it to serve",
        )
        found.sockets = found.connections() + 1
        found.memory = found.process.memory_info().rss >> 20
        yield found


async def storm(port: int, said: list[Conversation]) -> tuple[Counter[int], list[str]]:
    """Send all conversations, a few together; returns statuses, and the bytes that were not a response."""
    room = asyncio.Semaphore(AT_ONCE)
    statuses: Counter[int] = Counter()
    faults: list[str] = []

    async def one(number: int, conversation: Conversation) -> None:
        async with room:
            try:
                statuses.update(await talk(port, conversation))
            except (NoHttp, ValueError) as error:
                faults.append(f"{number}: {error!r} to {conversation.raw[:300]!r}")

    async with asyncio.TaskGroup() as group:
        for number, item in enumerate(said):
            group.create_task(one(number, item))
    return statuses, faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "conversations"),
    [
        (1, 200),
        *(pytest.param(seed, 5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]) for seed in (2, 3)),
    ],
)
async def test_random_conversations(besieged: Besieged, seed: int, conversations: int) -> None:
    """`seed` produces the bytes; a fault names the number of its conversation."""
    rng = random.Random(seed)
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    for _ in range(0, conversations, 100):
        seen, wrong = await storm(besieged.served.port, [conversation(rng) for _ in range(100)])
        statuses += seen
        faults += wrong
        await asyncio.to_thread(besieged.check, f"seed {seed}")
    assert not faults, "\n".join(faults)
    assert statuses[200] > 0, "nothing of it was right"
    assert statuses[500] == 0, statuses
    await asyncio.to_thread(besieged.check_rest)


@pytest.mark.slow
def test_a_request_cut_at_every_byte(besieged: Besieged) -> None:
    """Clients that disconnect there, and clients that continue a moment later."""
    body = json.dumps({"model": "echo", "prompt": "cut", "max_tokens": 3}).encode()
    raw = post("/v1/completions", body)
    gone = [Conversation([raw[:at]], hangs_up=True) for at in range(len(raw) + 1)]
    _, faults = asyncio.run(storm(besieged.served.port, gone))
    halves = [Conversation([raw[:at], raw[at:]]) for at in range(1, len(raw))]
    statuses, more = asyncio.run(storm(besieged.served.port, halves))
    assert not faults + more
    assert statuses == {200: len(raw) - 1}
    besieged.check("cut at every byte")
    besieged.check_rest()


@pytest.mark.slow
def test_a_refused_request_leaves_no_job(besieged: Besieged) -> None:
    rng = random.Random(5)
    before = besieged.submitted()
    for number in range(150):
        path = rng.choice(["/v1/chat/completions", "/v1/completions"])
        raw = post(path, raw_requests.mutated_json(rng, path), "application/json", "connection: close")
        status = int(besieged.served.ask(raw)[9:12])
        assert status in {200, 504} | set(REFUSED), (number, status, raw)
        if status in REFUSED:
            assert besieged.submitted() == before, (
                f"{number}: refused with {status}, and there is a job\n{raw!r}"
            )
        before = besieged.submitted()
    besieged.check_rest()


@pytest.mark.slow
def test_readers_that_stop_reading(besieged: Besieged) -> None:
    """Streams whose readers read only the first bytes: closed after a while, their jobs cancelled."""
    body = json.dumps({"model": "echo", "prompt": "z" * 1000, "max_tokens": 4000, "n": 128, "stream": True,
                       "ignore_eos": True, "logprobs": 5}).encode()  # fmt: skip
    with ExitStack() as deaf:
        for _ in range(8):
            sock = deaf.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.settimeout(60)
            sock.connect(("127.0.0.1", besieged.served.port))
            sock.sendall(post("/v1/completions", body))
            assert sock.recv(9) == b"HTTP/1.1 "
        eventually(lambda: not besieged.active(), f"their jobs to be cancelled: {besieged.active()}", 90)
        besieged.check("deaf readers")
    besieged.check_rest()


@pytest.mark.slow
def test_requests_in_one_go(besieged: Besieged) -> None:
    """Pipelined: as many responses as requests, in their order."""
    count = 200
    texts = [f"p{i:03d}" for i in range(count)]
    asks = [{"model": "echo", "prompt": text, "max_tokens": 4} for text in texts]
    raw = b"".join(post("/v1/completions", json.dumps(ask).encode()) for ask in asks)
    with besieged.served.connect() as sock:
        sock.sendall(raw)
        found = b""
        while found.count(b'"text":') < count and (piece := sock.recv(1 << 16)):
            found += piece
    places = [found.find(f'"text":"{text}"'.encode()) for text in texts]
    assert -1 not in places
    assert places == sorted(places)
    besieged.check_rest()
