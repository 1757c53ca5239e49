"""Restarts of servers whose default user is locked: the restored keys, and the earlier report of `pagemill doctor`."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pagemill.cli.doctor import examine
from pagemill.producer.doctor.server_checks import LOCKED_DEFAULT_USER, REPLAYED_COMMANDS
from pagemill.producer.wire.server import scripts
from tests.conftest import RedisServer, server_binary
from tests.integration.test_redis_deployments import SECURITY_PAGE, commands_of, documented_users
from tests.producer.driving import Queue, delta, open_queue
from tests.topologies import redis7_binary

QUEUE = "default"
PASSWORD = "pass-word"
BINARIES: dict[str, Callable[[], Path]] = {
    "valkey": lambda: server_binary("valkey-server"),
    "redis62": lambda: server_binary("redis-server"),
    "redis7": redis7_binary,
}


def documented_default_user() -> str:
    """The ACL rules of the locked default user in docs/security.md."""
    (rules,) = re.findall(r"^user default (.*)$", SECURITY_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return str(rules)


def write_users(directory: Path, default_rules: str) -> Path:
    """Write an ACL file with the documented users, an administrator, and the given default user."""
    users = {user: " ".join(rules) for user, rules in documented_users(QUEUE).items()}
    users["admin"] = "on ~* &* +@all"
    lines = [f"user {user} {rules} >{PASSWORD}\n" for user, rules in users.items()]
    path = directory / "users.acl"
    path.write_text(f"user default {default_rules}\n{''.join(lines)}")
    return path


@pytest.fixture(params=BINARIES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A server of each supported kind with the documented users and an append-only file."""
    options = ("--aclfile", str(write_users(tmp_path, documented_default_user())), "--appendfsync", "always")
    binary = BINARIES[request.param]()
    with RedisServer(binary, tmp_path / "server", options, login=f"admin:{PASSWORD}@") as server:
        yield server


def open_as(user: str, server: RedisServer) -> Queue:
    return open_queue(server.url.replace("admin:", f"{user}:"), QUEUE)


def fill(server: RedisServer) -> None:
    """Put a job into each state: `ended`, `lost` (dead), `running` with a checkpoint, `waiting` and `delayed`."""
    producer, worker = open_as("producer", server), open_as("worker", server)
    producer.submit("ended", "lost", "running", "waiting", "more")
    producer.submit("delayed", delay=3600.0)
    worker.commit(worker.pull_one())
    worker.fail(worker.pull_one(), "dead")
    worker.checkpoint(worker.pull_one(), delta(0, 7, 8))
    states = {name: producer.state(name) for name in ("ended", "lost", "running", "waiting", "delayed")}
    assert states == {
        "ended": "succeeded", "lost": "dead", "running": "running", "waiting": "queued", "delayed": "delayed",
    }  # fmt: skip
    for queue in (producer, worker):
        queue.transport.close()


def contents(server: RedisServer) -> dict[bytes, tuple[Any, bool]]:
    """Key -> its value, and whether it expires."""
    with redis.Redis.from_url(server.url) as client:
        read = {
            b"string": client.get,
            b"hash": client.hgetall,
            b"set": client.smembers,
            b"list": lambda key: client.lrange(key, 0, -1),
            b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        }
        return {key: (read[client.type(key)](key), client.pttl(key) > 0) for key in client.scan_iter()}


def reported(server: RedisServer) -> tuple[str, str]:
    """The level and the remedy of doctor's finding about the default user."""
    findings, _ = examine(server.url, QUEUE, 0)
    (found,) = (finding for finding in findings if finding.check == "default user")
    return found.level, found.remedy


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "shutdown"])
def test_restart_with_the_documented_users_keeps_every_key(server: RedisServer, end: signal.Signals) -> None:
    fill(server)
    before = contents(server)
    assert reported(server)[0] == "ok"
    server.kill(end)
    server.start()
    assert contents(server) == before
    producer, worker = open_as("producer", server), open_as("worker", server)
    worker.lapse("running")
    producer.submit("new")
    pulled = {job.job_id: job for job in worker.pull()}
    assert pulled.keys() == {"running", "waiting", "more", "new"}
    for job in pulled.values():
        worker.commit(job)
    assert {producer.state(name) for name in (*pulled, "ended")} == {"succeeded"}
    assert (producer.state("lost"), producer.state("delayed")) == ("dead", "delayed")
    for queue in (producer, worker):
        queue.transport.close()


@pytest.mark.parametrize("rules", ["off", "on nopass ~* &* +ping", "off ~* &* +@all -@dangerous"])
def test_doctor_reports_an_error_exactly_where_a_restart_loses_keys(
    server: RedisServer, tmp_path: Path, rules: str
) -> None:
    fill(server)
    before = contents(server)
    write_users(tmp_path, rules)
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "LOAD")
    level, remedy = reported(server)
    server.kill()
    server.start()
    assert level == ("ok" if contents(server) == before else "error")
    # The file still has the writes: the documented line restores them.
    write_users(tmp_path, documented_default_user())
    server.kill()
    server.start()
    assert contents(server) == before
    assert reported(server)[0] == "ok"
    assert level == "ok" or f"user default {documented_default_user()}" in remedy


def test_documented_default_user_is_the_one_that_doctor_recommends() -> None:
    assert documented_default_user() == LOCKED_DEFAULT_USER


def test_doctor_checks_every_write_command_of_the_scripts(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        writes = {name.upper() for name, command in client.command().items() if "write" in command["flags"]}
    # The server itself selects a database, and expires keys.
    used = (commands_of(valkey_url, scripts.names()) & writes) | {"DEL", "PEXPIREAT", "SELECT"}
    assert not used - set(REPLAYED_COMMANDS)
