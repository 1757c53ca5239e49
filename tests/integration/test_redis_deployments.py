"""Jobs through every supported kind of server: versions, TLS, users, Sentinel, Cluster."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from pagemill import AccessDenied, AsyncProducer, Producer, RedisUnavailable
from pagemill.__main__ import app
from pagemill.producer.wire.calls import memory
from pagemill.producer.wire.server import scripts
from pagemill.producer.wire.server.clients import open_client
from tests.conftest import ROOT, RedisServer, _free_port
from tests.topologies import (
    Certificates,
    ClusterSetup,
    SentinelSetup,
    cluster_setup,
    redis7_binary,
    sentinel_setup,
    tls_server,
    until,
)
from tests.worker.harness import get, running_worker, worker_config

pytestmark = pytest.mark.slow

ASKED_DIRECTLY = {"EVALSHA", "SCRIPT|LOAD", "PING", "SUBSCRIBE", "UNSUBSCRIBE", "INFO", "BLPOP", "TIME"}
"""Commands that clients send directly."""
OF_A_PURGE = {name for name in scripts.names() if name.startswith("purge_") or name == "usage_erase"}
SECURITY_PAGE = ROOT / "docs" / "security.md"
CONFIDENTIALITY_PAGE = ROOT / "docs" / "confidentiality.md"


def check_that_jobs_run(url: str, queue: str) -> None:
    """One job of each kind: single, streamed, a batch, and asyncio; against a worker at the same URL."""
    with running_worker(worker_config(url, queue)), Producer(url, queue=queue) as producer:
        handle = producer.submit(prompt="single", model="echo", max_tokens=6, stream=True)
        assert [event.type for event in handle.stream()][-1] == "end"
        assert handle.result(timeout=120).text == "single"
        jobs = ({"prompt": f"row {i}", "model": "echo", "max_tokens": 8} for i in range(600))
        batch = producer.submit_many(jobs)
        assert batch.wait(timeout=120).succeeded == 600
        assert sum(1 for _ in batch.results()) == 600
        assert asyncio.run(_async_text(url, queue)) == "async"


async def _async_text(url: str, queue: str) -> str:
    async with AsyncProducer(url, queue=queue) as producer:
        handle = await producer.submit(prompt="async", model="echo", max_tokens=5)
        return (await handle.result(timeout=120)).text


def test_redis_6_2(redis62_url: str, queue_name: str) -> None:
    check_that_jobs_run(redis62_url, queue_name)


def test_redis_7_0(tmp_path: Path, queue_name: str) -> None:
    server = RedisServer(redis7_binary(), tmp_path / "redis7")
    server.start()
    try:
        check_that_jobs_run(server.url, queue_name)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def test_tls(tmp_path: Path, queue_name: str, certificates: Certificates) -> None:
    with tls_server(tmp_path, certificates) as url:
        check_that_jobs_run(url, queue_name)
        with (
            Producer(url.partition("?")[0], queue=queue_name) as distrustful,
            pytest.raises(RedisUnavailable, match="certificate"),
        ):
            distrustful.submit(prompt="p", model="echo")


# Users


def documented_users(queue: str) -> dict[str, list[str]]:
    """The ACL rules that docs/security.md prints, for this queue: user -> rules."""
    rules = re.findall(r"^ACL SETUSER (\S+) (.*)$", SECURITY_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rules) == 2
    return {user: text.replace("{default}", f"{{{queue}}}").split() for user, text in rules}


@pytest.mark.parametrize("server_fixture", ["valkey_url", "redis62_url"])
def test_users_with_the_documented_rights_can_work_and_do_no_more(
    request: pytest.FixtureRequest, server_fixture: str, queue_name: str
) -> None:
    url: str = request.getfixturevalue(server_fixture)
    with redis.Redis.from_url(url) as admin:
        for user, rules in documented_users(queue_name).items():
            admin.execute_command("ACL", "SETUSER", user, *rules, ">pass@word")
    place = url.removeprefix("redis://")
    producer_url, worker_url = (f"redis://{user}:pass%40word@{place}" for user in ("producer", "worker"))
    with (
        running_worker(worker_config(worker_url, queue_name)) as worker,
        Producer(producer_url, queue=queue_name) as producer,
    ):
        handle = producer.submit(prompt="allowed", model="echo", max_tokens=7, stream=True, metadata={"a": 1})
        assert [event.type for event in handle.stream()][-1] == "end"
        assert handle.result(timeout=120).text == "allowed"
        batch = producer.submit_many([{"prompt": "b", "model": "echo", "max_tokens": 1}] * 3)
        assert batch.wait(timeout=120).succeeded == 3
        waiting = producer.submit(prompt="later", model="echo", delay=3600.0)
        assert waiting.cancel()
        assert waiting.status().state == "cancelled"
        assert worker.connectivity.is_up
        with (
            Producer(producer_url, queue="another") as stranger,
            pytest.raises(AccessDenied, match="denies this user"),
        ):
            stranger.submit(prompt="p", model="echo")
    for user_url in (producer_url, worker_url):
        with redis.Redis.from_url(user_url) as client:
            for command in (["KEYS", "*"], ["FLUSHALL"], ["CONFIG", "GET", "*"], ["GET", "elsewhere"]):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command)


def commands_of(url: str, names: Iterable[str]) -> set[str]:
    """The commands that the scripts may run."""
    with redis.Redis.from_url(url) as client:
        commands = {name.upper() for name in client.command()}
    text = "".join(map(scripts.source, names))
    return set(re.findall(r"'([A-Z]+)'", text)) & commands


def test_the_documented_users_may_run_what_the_scripts_run_and_no_more(valkey_url: str) -> None:
    used = commands_of(valkey_url, set(scripts.names()) - OF_A_PURGE)
    # The jobs page, and the kinds of data in memory: optional, and documented.
    used -= {"SCAN", "RANDOMKEY", "MEMORY"}
    assert {"HSET", "ZADD", "PUBLISH", "TIME"} <= used
    for user, rules in documented_users("default").items():
        granted = {rule[1:].upper() for rule in rules if rule.startswith("+")}
        assert not used - granted, f"{user} lacks {sorted(used - granted)}"
        assert not granted - used - ASKED_DIRECTLY, f"{user} needs no {sorted(granted - used)}"


def test_queue_stats_copes_with_short_memory_as_a_documented_user(
    own_valkey: RedisServer, queue_name: str
) -> None:
    """The runbook's command for full memory: parts that need further rights are omitted, with a line."""
    with (
        redis.Redis.from_url(own_valkey.url) as admin,
        Producer(own_valkey.url, queue=queue_name) as producer,
    ):
        admin.execute_command(
            "ACL", "SETUSER", "producer", *documented_users(queue_name)["producer"], ">word"
        )
        producer.submit(prompt="p", model="echo")
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] * 1.1))
    url = own_valkey.url.replace("redis://", "redis://producer:word@")
    done = CliRunner().invoke(app, ["queue", "stats", "--queue", queue_name, "--redis-url", url])
    assert done.exit_code == 0, done.output
    assert "queued" in done.stdout
    assert memory.SAMPLE_RIGHTS in done.stderr
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.execute_command("ACL", "SETUSER", "producer", *memory.SAMPLE_RIGHTS.split())
    done = CliRunner().invoke(app, ["queue", "stats", "--queue", queue_name, "--redis-url", url])
    assert done.exit_code == 0
    assert memory.SAMPLE_RIGHTS not in done.stderr


COMMANDS = (
    "status {job}", "inspect {job}", "why {job}", "cancel {job}", "verify {job}", "usage", "workers", "batch list",
    "batch status {batch}", "batch cancel {batch}", "batch results {batch}", "queue stats", "queue pause",
    "queue resume", "queue limit", "queue limit --jobs 9", "queue weights acme=2", "queue quota acme --running 2",
    "dead list", "dead show {job}", "dead replay {job}", "dead purge {job}", "recall list", "adapter list",
    "rollout status m", "rollout start m --to r2 --share 0.5 --force", "rollout halt m", "rollout finish m",
    "top --once",
)  # fmt: skip


def test_every_command_runs_as_the_documented_producer_with_short_memory(
    own_valkey: RedisServer, queue_name: str, tmp_path: Path
) -> None:
    url = own_valkey.url.replace("redis://", "redis://producer:word@")
    environment = {
        "PAGEMILL_REDIS_URL": url,
        "PAGEMILL_QUEUE": queue_name,
        "PAGEMILL_STATE_DIR": str(tmp_path),
    }
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.execute_command(
            "ACL", "SETUSER", "producer", *documented_users(queue_name)["producer"], ">word"
        )
        with Producer(url, queue=queue_name, model="m") as producer:
            job = producer.submit(prompt="p").id
            batch = producer.submit_many([{"prompt": "p"}]).id
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] * 1.25))
        for command in COMMANDS:
            arguments = command.format(job=job, batch=batch).split()
            done = CliRunner().invoke(app, arguments, env=environment)
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
            assert done.exit_code in (0, 1, 4), (command, done.output)
        denied = admin.execute_command("ACL", "LOG")
    assert {entry[b"object"] for entry in denied} <= {b"randomkey", b"client|setinfo"}


def test_what_a_purge_may_run_besides_is_documented(valkey_url: str) -> None:
    (listed,) = re.findall(r"needs `(\+scan[^`]*)`", CONFIDENTIALITY_PAGE.read_text(encoding="utf-8"))
    documented = {word[1:].upper() for word in listed.split()}
    others = {rule[1:].upper() for rule in documented_users("default")["producer"] if rule.startswith("+")}
    assert commands_of(valkey_url, OF_A_PURGE) - others == documented


def test_a_wrong_password_is_said_and_never_shown(valkey_url: str) -> None:
    url = valkey_url.replace("redis://", "redis://nobody:hunter2@")
    with Producer(url) as producer, pytest.raises(RedisUnavailable) as refused:
        producer.submit(prompt="p", model="echo")
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(worker_config(url, "q"))


def test_a_server_that_does_not_say_how_it_is_still_serves(
    valkey_url: str, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed servers hide INFO."""
    with redis.Redis.from_url(valkey_url) as admin:
        rules = [rule for rule in documented_users(queue_name)["worker"] if rule != "+info"]
        admin.execute_command("ACL", "SETUSER", "managed", *rules, ">word")
    url = valkey_url.replace("redis://", "redis://managed:word@")
    with (
        running_worker(worker_config(url, queue_name)) as worker,
        Producer(url, queue=queue_name) as producer,
    ):
        assert producer.submit(prompt="p", model="echo", max_tokens=1).result(timeout=120).text == "p"
        assert "denies INFO" in caplog.text
        status, metrics = get(f"{worker.http_url}/metrics")
        assert status == 200
        assert b"pagemill_redis_up 1.0" in metrics or b"pagemill_redis_up{" in metrics
        assert worker.connectivity.is_up


# Sentinel


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSetup]:
    with sentinel_setup(tmp_path_factory.mktemp("sentinel")) as setup:
        yield setup


def test_sentinel_failover(sentinel: SentinelSetup, queue_name: str) -> None:
    check_that_jobs_run(sentinel.url, queue_name)
    with (
        running_worker(worker_config(sentinel.url, queue_name, model="echo:5", lease_s=60.0)) as worker,
        Producer(sentinel.url, queue=queue_name) as producer,
    ):
        text = "0123456789" * 30
        handle = producer.submit(prompt=text, model="echo", max_tokens=300)
        until(lambda: handle.progress().generated_tokens, "the first tokens")
        sentinel.master.kill()
        until(lambda: sentinel.master_port() == sentinel.replica.port, "the replica to be promoted")
        assert handle.result(timeout=120).text == text
        later = producer.submit(prompt="later", model="echo", max_tokens=5)
        assert later.result(timeout=120).text == "later"
        assert worker.counters.redis_reconnects.read() >= 1


def test_a_sentinel_that_is_not_there_is_said(queue_name: str) -> None:
    with (
        Producer(f"redis+sentinel://127.0.0.1:{_free_port()}/mymaster", queue=queue_name) as producer,
        pytest.raises(RedisUnavailable, match="mymaster"),
    ):
        producer.submit(prompt="p", model="echo")


# Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSetup]:
    with cluster_setup(tmp_path_factory.mktemp("cluster")) as setup:
        yield setup


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_queue_is_served_by_the_owner_of_its_slot(cluster: ClusterSetup, node: int) -> None:
    queue = cluster.queue_of(node)
    # The named seeds need not be the owner, and one may be down.
    url = f"redis+cluster://127.0.0.1:{_free_port()},127.0.0.1:{cluster.nodes[(node + 1) % 3].port}"
    check_that_jobs_run(url, queue)
    for index in range(3):
        found = list(cluster.client(index).scan_iter(f"pagemill:{{{queue}}}:*"))
        assert bool(found) == (index == node)


def test_a_slot_moves_while_jobs_are_submitted_and_run(cluster: ClusterSetup) -> None:
    queue = cluster.queue_of(0)
    with (
        running_worker(worker_config(cluster.url, queue, model="echo:2", lease_s=60.0)) as worker,
        Producer(cluster.url, queue=queue) as producer,
    ):
        first = producer.submit_many(
            {"prompt": f"{i:04d} " * 20, "model": "echo", "max_tokens": 100} for i in range(300)
        )
        until(lambda: first.counts().succeeded >= 10, "the middle of the batch")
        cluster.begin_move(queue, 1)
        # No script may run while the keys are split between nodes: the server replies ASK, and all calls wait.
        until(lambda: not worker.connectivity.is_up, "the worker to notice")
        with pytest.raises(RedisUnavailable):
            first.counts()
        batches = []
        submitting = threading.Thread(
            target=lambda: batches.append(
                producer.submit_many({"prompt": f"{i}", "model": "echo", "max_tokens": 4} for i in range(600))
            )
        )
        cluster.finish_move(queue, 1)
        submitting.start()
        submitting.join(timeout=120)
        assert first.wait(timeout=120).succeeded == 300
        assert batches[0].wait(timeout=120).succeeded == 600
        assert worker.counters.leases_lost.read() == 0
    assert cluster.owner(queue) == 1


def test_the_exporter_finds_the_queues_of_every_master(cluster: ClusterSetup) -> None:
    queues = [cluster.queue_of(node) for node in range(3)]
    for queue in queues:
        with Producer(cluster.url, queue=queue) as producer:
            producer.submit(prompt="p", model="nobody-serves-it")
    # One seed is enough, and it need not be the first.
    url = f"redis+cluster://127.0.0.1:{_free_port()},127.0.0.1:{cluster.nodes[1].port}"
    command = [sys.executable, "-m", "pagemill", "exporter", "--redis-url", url, "--http-port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next((found[1] for line in lines if (found := re.search(r"metrics at (\S+)", line))), None)
        assert address is not None, "it ended"
        _, metrics = get(address)
    finally:
        process.kill()
        process.communicate()
    found = set(re.findall(r'pagemill_queue_jobs\{queue="([^"]+)",state="waiting"\} [1-9]', metrics.decode()))
    assert set(queues) <= found


def test_forgotten_scripts_are_taught_to_the_owner_again(cluster: ClusterSetup) -> None:
    queue = cluster.queue_of(2)
    with Producer(cluster.url, queue=queue) as producer:
        producer.submit(prompt="p", model="echo")
        cluster.client(2).script_flush()
        assert (
            producer.submit_many({"prompt": "p", "model": "echo"} for _ in range(600)).counts().queued == 600
        )
    with open_client(cluster.url, queue) as client:
        assert client.info("server")["tcp_port"] == cluster.nodes[2].port
