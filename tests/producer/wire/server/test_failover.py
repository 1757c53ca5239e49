"""A failover behind one address: new connections reach the new primary, open ones stay at the old one, a replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from pagemill import AsyncProducer, Producer
from pagemill.producer.wire.calls import reads
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.server.clients import open_async_client, open_client
from pagemill.producer.wire.server.transport import AsyncTransport, SyncTransport
from tests.chaos.tcp_proxy import TcpProxy
from tests.conftest import RedisServer, server_binary
from tests.producer.scripted_worker import scripted_worker
from tests.topologies import until
from tests.worker.harness import running_worker, worker_config

QUICK = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


@dataclass
class Pair:
    """Two servers behind one address."""

    first: RedisServer
    second: RedisServer
    proxy: TcpProxy

    def replicate(self) -> None:
        with redis.Redis(port=self.second.port) as admin:
            admin.replicaof("127.0.0.1", self.first.port)
            until(lambda: admin.info("replication")["master_link_status"] == "up", "the replica to follow")

    def fail_over(self) -> None:
        with redis.Redis(port=self.first.port) as old, redis.Redis(port=self.second.port) as new:
            new.replicaof("no", "one")
            old.replicaof("127.0.0.1", self.second.port)
        self.proxy.set_target(self.second.port)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    servers = [RedisServer(server_binary("valkey-server"), tmp_path / name, QUICK) for name in ("a", "b")]
    try:
        for server in servers:
            server.start()
        with TcpProxy(servers[0].port) as proxy:
            yield Pair(servers[0], servers[1], proxy)
    finally:
        for server in servers:
            server.kill()


def test_a_connection_to_a_demoted_server_is_replaced(pair: Pair) -> None:
    transport = SyncTransport(open_client(pair.proxy.url, "q"))
    state = reads.outcome("q", "a")
    with Producer(pair.proxy.url, queue="q") as producer, contextlib.closing(transport):
        handle = producer.submit(prompt="x", model="m")
        assert transport.run(state).state is None
        pair.fail_over()
        handle = producer.submit(prompt="y", model="m", idempotency_key="y")
        assert handle.status().state == "queued"
        pending = transport.begin(state)
        with contextlib.suppress(RedisUnavailable):
            pending.finish()
        assert transport.run_many([state, state])[0].state is None
        with redis.Redis(port=pair.second.port) as new:
            assert new.info("stats")["total_commands_processed"] > 0
            assert new.keys("*job:*")


async def test_so_is_one_of_asyncio(pair: Pair) -> None:
    transport = AsyncTransport(open_async_client(pair.proxy.url, "q", max_connections=2))
    async with AsyncProducer(pair.proxy.url, queue="q") as producer:
        await producer.submit(prompt="x", model="m")
        await transport.run(reads.outcome("q", "a"))
        await asyncio.to_thread(pair.fail_over)
        handle = await producer.submit(prompt="y", model="m")
        assert (await handle.status()).state == "queued"
        found = await asyncio.gather(*(transport.run(reads.outcome("q", "a")) for _ in range(5)))
        assert [outcome.state for outcome in found] == [None] * 5
    await transport.close()


@pytest.mark.slow
def test_a_worker_and_its_clients_survive_a_failover(pair: Pair) -> None:
    pair.replicate()
    with (
        running_worker(worker_config(pair.proxy.url, "q", model="echo:10:echo")),
        Producer(pair.proxy.url, queue="q") as producer,
    ):
        jobs = ({"prompt": f"job {number}", "model": "echo", "max_tokens": 8} for number in range(30))
        before = producer.submit_many(jobs, batch_id="before")
        running = producer.submit(prompt="x" * 400, model="echo", max_tokens=400)
        until(lambda: running.status().state == "running", "the long job to run")
        pair.fail_over()
        after = [producer.submit(prompt=f"{number}", model="echo") for number in range(15)]
        assert before.wait(timeout=120).succeeded == 30
        assert running.result(timeout=120).text == "x" * 400
        assert [handle.result(timeout=120).text for handle in after] == [str(number) for number in range(15)]


@pytest.mark.slow
def test_a_wait_that_blocks_survives_a_failover(pair: Pair) -> None:
    pair.replicate()
    with Producer(pair.proxy.url, queue="q") as producer:
        handle = producer.submit(prompt="p", model="m")
        waiting = asyncio.get_event_loop_policy().new_event_loop()
        try:
            result = waiting.run_in_executor(None, handle.result)
            waiting.run_until_complete(asyncio.sleep(0.5))
            pair.fail_over()
            with scripted_worker(pair.proxy.url, "q"):
                assert waiting.run_until_complete(asyncio.wait_for(result, 120)).text == "p"
        finally:
            waiting.close()
