"""Producers submit while the server restarts, forgets scripts, or is unreachable: they raise only Pagemill errors."""

from __future__ import annotations

import asyncio
import random
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import redis

from pagemill import AsyncProducer, PagemillError, Producer
from pagemill.producer.wire.schema.errors import (
    AccessDenied,
    InvalidAddress,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
)
from tests.chaos.tcp_proxy import TcpProxy
from tests.conftest import RedisServer, server_binary
from tests.worker.harness import QueueClient, eventually

pytestmark = pytest.mark.slow

THREADS = TASKS = 3


class Submits:
    """The submitted jobs: acknowledged ids, and every error."""

    def __init__(self, url: str, queue: str) -> None:
        self._url = url
        self._queue = queue
        self.stop = threading.Event()
        self.answered: list[str] = []
        self.errors: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._submit) for _ in range(THREADS)]
        threads += [threading.Thread(target=lambda: asyncio.run(self._submit_tasks()))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()

    def check(self, client: QueueClient) -> None:
        assert [error for error in self.errors if not isinstance(error, RedisUnavailable)] == []
        assert len(self.answered) > 5
        assert len(set(self.answered)) == len(self.answered)
        for start in range(0, len(self.answered), 500):
            for job_id in self.answered[start : start + 500]:
                assert client.status(job_id).state == "queued"

    def _submit(self) -> None:
        with Producer(self._url, queue=self._queue) as producer:
            while not self.stop.is_set():
                try:
                    self.answered.append(producer.submit(prompt="p", model="echo").id)
                    batch = producer.submit_many({"prompt": "p", "model": "echo"} for _ in range(20))
                    batch.counts()
                except PagemillError as error:
                    self.errors.append(error)
                except BaseException as error:  # the test's subject
                    self.errors.append(error)
                    raise

    async def _submit_tasks(self) -> None:
        async with AsyncProducer(self._url, queue=self._queue) as producer:
            await asyncio.gather(*(self._submit_async(producer) for _ in range(TASKS)))

    async def _submit_async(self, producer: AsyncProducer) -> None:
        while not self.stop.is_set():
            try:
                self.answered.append((await producer.submit(prompt="p", model="echo")).id)
                batch = await producer.submit_many({"prompt": "p", "model": "echo"} for _ in range(20))
                await batch.counts()
            except PagemillError as error:
                self.errors.append(error)
                await asyncio.sleep(0)
            except BaseException as error:
                self.errors.append(error)
                raise


def test_restarts_and_flushes(own_valkey: RedisServer, queue_name: str) -> None:
    rng = random.Random(1)
    submits = Submits(own_valkey.url, queue_name)
    flushing = threading.Event()

    def flush() -> None:
        with redis.Redis.from_url(own_valkey.url, retry=None) as client:
            while not flushing.wait(0.002):
                with suppress(redis.RedisError):
                    client.script_flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    try:
        with submits.running():
            for _ in range(6):
                time.sleep(rng.uniform(0.2, 0.6))
                own_valkey.kill()
                time.sleep(rng.uniform(0.0, 0.1))
                own_valkey.start()
            eventually(lambda: len(submits.answered) > 5, "some accepted jobs, even on a busy machine")
    finally:
        flushing.set()
        flusher.join()
    client = QueueClient(own_valkey.url, queue_name)
    submits.check(client)
    client.redis.close()


def test_a_server_that_never_keeps_a_script_is_away(
    own_valkey: RedisServer, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a server that is flushed between every load and every call; without a limit this would never end."""
    from pagemill.producer.wire.server import transport

    monkeypatch.setattr(transport.scripts, "sha1", lambda name: "0" * 40)
    with (
        Producer(own_valkey.url, queue=queue_name) as producer,
        pytest.raises(RedisUnavailable, match="No matching script"),
    ):
        producer.submit(prompt="p", model="echo")

    async def submit() -> None:
        async with AsyncProducer(own_valkey.url, queue=queue_name) as other:
            await other.submit(prompt="p", model="echo")

    with pytest.raises(RedisUnavailable, match="No matching script"):
        asyncio.run(submit())


def test_connections_are_cut_at_every_phase(own_valkey: RedisServer, queue_name: str) -> None:
    rng = random.Random(2)
    with TcpProxy(own_valkey.port) as proxy:
        submits = Submits(proxy.url, queue_name)
        with submits.running():
            for _ in range(60):
                time.sleep(rng.uniform(0.0, 0.05))
                proxy.set_mode(rng.choice(["pass", "pass", "refuse"]))
                proxy.reset_all()
            proxy.set_mode("pass")
            time.sleep(0.5)
    client = QueueClient(own_valkey.url, queue_name)
    submits.check(client)
    client.redis.close()


# Errors of servers


def submitted(url: str, queue: str, *, bulk: bool = True) -> list[BaseException]:
    """The errors of a submit, a bulk submit and their asynchronous counterparts. In bulk they retry for a while."""
    job = {"prompt": "p", "model": "echo"}

    async def asynchronously(bulk: bool) -> None:
        async with AsyncProducer(url, queue=queue) as producer:
            await (producer.submit_many([job], on_full="raise") if bulk else producer.submit(job))

    def synchronously(bulk: bool) -> None:
        with Producer(url, queue=queue) as producer:
            producer.submit_many([job], on_full="raise") if bulk else producer.submit(job)

    ways: list[Callable[[], None]] = []
    for in_bulk in (False, True) if bulk else (False,):
        ways += [
            partial(synchronously, in_bulk),
            lambda in_bulk=in_bulk: asyncio.run(asynchronously(in_bulk)),
        ]
    raised: list[BaseException] = []
    for way in ways:
        with pytest.raises(PagemillError) as caught:
            way()
        raised.append(caught.value)
    return raised


def all_are(errors: list[BaseException], kind: type[BaseException], words: str) -> None:
    for error in errors:
        assert type(error) is kind, repr(error)
        assert words in str(error)
        assert "\n" not in str(error)


def test_a_database_that_is_not_there(own_valkey: RedisServer, queue_name: str) -> None:
    all_are(
        submitted(f"redis://127.0.0.1:{own_valkey.port}/99999", queue_name),
        InvalidAddress,
        "no such database",
    )


def test_rights_and_passwords(own_valkey: RedisServer, queue_name: str) -> None:
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.acl_setuser(
            "reader", enabled=True, passwords=["+secret"], commands=["+ping", "+get"], keys=["*"]
        )
        address = f"127.0.0.1:{own_valkey.port}/0"
        all_are(submitted(f"redis://reader:secret@{address}", queue_name), AccessDenied, "docs/security.md")
        all_are(
            submitted(f"redis://reader:wrong@{address}", queue_name, bulk=False), RedisUnavailable, "password"
        )
        admin.config_set("requirepass", "secret")
    all_are(submitted(own_valkey.url, queue_name, bulk=False), RedisUnavailable, "password")


def test_a_replica_and_a_full_memory(own_valkey: RedisServer, queue_name: str) -> None:
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", 1)
        all_are(submitted(own_valkey.url, queue_name), QueueFull, "maxmemory")
        admin.config_set("maxmemory", 0)
        admin.replicaof("127.0.0.1", "1")
        all_are(submitted(own_valkey.url, queue_name, bulk=False), RedisUnavailable, "rejects calls now")


def test_a_disk_that_takes_nothing(tmp_path: Path, queue_name: str) -> None:
    """A snapshot cannot be written, and the server rejects writes with MISCONF, as it does on a full disk."""
    options = ("--enable-protected-configs", "yes", "--appendonly", "no", "--save", "3600 1")
    server = RedisServer(server_binary("valkey-server"), tmp_path / "valkey", options)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("dir", "/proc")
            admin.bgsave()
            eventually(
                lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", "the snapshot to fail"
            )
        all_are(submitted(server.url, queue_name, bulk=False), RedisUnavailable, "rejects calls now")
    finally:
        server.kill()


def test_somebody_elses_keys(own_valkey: RedisServer, queue_name: str) -> None:
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.set(f"pagemill:{{{queue_name}}}:counts", "a string where a hash should be")
    all_are(submitted(own_valkey.url, queue_name), RedisRefused, "WRONGTYPE")


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b":abc\r\n", b"*x\r\n", b"$-7\r\n",
        b"-\r\n",
    ],
)  # fmt: skip
def test_what_is_no_redis_server(greeting: bytes, queue_name: str) -> None:
    class Talker(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.sendall(greeting)
                self.request.recv(1 << 16)
                self.request.sendall(greeting)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        errors = submitted(f"redis://127.0.0.1:{server.server_address[1]}/0", queue_name, bulk=False)
        server.shutdown()
    assert {type(error) for error in errors} <= {RedisUnavailable, RedisRefused}, errors
