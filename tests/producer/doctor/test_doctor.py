"""`pagemill doctor`: badly configured real servers, and its reports about them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from pagemill.cli import doctor as cli_doctor
from pagemill.cli.app import app
from pagemill.producer.doctor import machine_checks, server_checks
from pagemill.producer.doctor.finding import Finding
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.conftest import RedisServer, server_binary
from tests.producer.driving import Queue, open_queue


@pytest.fixture
def queue(own_valkey: RedisServer, queue_name: str) -> Iterator[Queue]:
    """A queue on a server that may be badly configured."""
    with open_queue(own_valkey.url, queue_name) as queue:
        yield queue


def doctor(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--redis-url", url, *arguments])


def levels(queue: Queue) -> dict[str, str]:
    """Check -> level, as `--json` reports it."""
    document = json.loads(doctor(queue.url, "--queue", queue.name, "--json").stdout)
    return {finding["check"]: finding["level"] for finding in document["findings"]}


def test_a_server_as_it_should_be_is_exit_code_0(queue: Queue) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",))))
    examined = doctor(queue.url, "--queue", queue.name, "--json")
    assert examined.exit_code == 0, examined.output
    document = json.loads(examined.stdout)
    assert document["verdict"] in ("ok", "note", "warning")  # the result depends on the machine
    checks = {finding["check"]: finding["level"] for finding in document["findings"]}
    for check in (
        "redis",
        "version",
        "eviction",
        "append-only file",
        "fsync",
        "clock",
        "scripts",
        "workers",
        "models",
        "revisions",
    ):
        assert checks[check] == "ok", document


def test_the_oldest_server_will_do(redis62_url: str, queue_name: str) -> None:
    document = json.loads(doctor(redis62_url, "--queue", queue_name, "--json").stdout)
    told = {finding["check"]: finding for finding in document["findings"]}
    assert told["version"]["message"].startswith("Redis 6.2")
    assert told["version"]["level"] == told["scripts"]["level"] == "ok"


@pytest.mark.parametrize(
    ("setting", "value", "check", "level"),
    [
        ("maxmemory-policy", "allkeys-lru", "eviction", "error"),
        ("appendonly", "no", "append-only file", "error"),
        ("appendfsync", "no", "fsync", "warning"),
        ("maxmemory", "1.25", "memory", "warning"),
        ("maxmemory", "1.05", "memory", "error"),
    ],
)
def test_what_endangers_jobs_is_found(queue: Queue, setting: str, value: str, check: str, level: str) -> None:
    if setting == "maxmemory":
        queue.client.setrange(
            "junk", 200_000_000, "x"
        )  # compared with which the checks' own time is negligible
        value = str(int(float(value) * int(queue.client.info("memory")["used_memory"])))
    queue.client.config_set(setting, value)
    found = doctor(queue.url, "--queue", queue.name)
    assert levels(queue)[check] == level
    assert found.exit_code == (1 if level == "error" else 0)
    line = next(line.split("\t") for line in found.stdout.splitlines() if line.split("\t")[1] == check)
    assert len(line) == 4, f"it says what to do: {line}"


@pytest.mark.slow
def test_slow_writes_are_found_though_no_fsync_counts_as_late(queue: Queue) -> None:
    queue.client.config_set("appendfsync", "always")
    queue.client.client_pause(3000, all=False)  # only writes
    document = json.loads(doctor(queue.url, "--queue", queue.name, "--json").stdout)
    found = {finding["check"]: finding for finding in document["findings"]}
    assert (found["fsync"]["level"], found["write latency"]["level"]) == ("ok", "warning")
    assert found["write latency"]["remedy"]
    assert not queue.client.exists(f"{queue.prefix}doctor")


def test_a_server_without_scripts_has_all_findings(tmp_path: Path) -> None:
    with RedisServer(server_binary("valkey-server"), tmp_path, ("--rename-command", "EVALSHA", "")) as server:
        document = json.loads(doctor(server.url, "--json").stdout)
    found = {finding["check"]: finding for finding in document["findings"]}
    assert found["scripts"]["level"] == "error"
    assert "EVALSHA" in found["scripts"]["message"]
    assert {"version", "eviction", "write latency"} <= found.keys()


def test_a_full_server_names_its_limit(queue: Queue) -> None:
    queue.client.config_set("maxmemory", "1mb")
    try:
        document = json.loads(doctor(queue.url, "--queue", queue.name, "--json").stdout)
    finally:
        queue.client.config_set("maxmemory", 0)
    (found,) = (each for each in document["findings"] if each["check"] == "write latency")
    assert (found["level"], found["remedy"]) == ("error", "raise maxmemory, or delete what is not needed")


def test_writes_that_are_rejected_are_an_error(queue: Queue) -> None:
    queue.client.config_set("min-replicas-to-write", 1)
    try:
        document = json.loads(doctor(queue.url, "--queue", queue.name, "--json").stdout)
    finally:
        queue.client.config_set("min-replicas-to-write", 0)
    (found,) = (each for each in document["findings"] if each["check"] == "write latency")
    assert (found["level"], "NOREPLICAS" in found["message"]) == ("error", True)
    assert "min-replicas-to-write" in found["remedy"]


def test_keys_that_were_evicted_are_an_error(queue: Queue) -> None:
    queue.client.config_set("maxmemory-policy", "allkeys-random")
    used = int(queue.client.info("memory")["used_memory"])
    queue.client.config_set("maxmemory", used + 300_000)
    for number in range(200):
        queue.client.set(f"x{number}", "y" * 10_000)
    queue.client.config_set("maxmemory", 0)
    queue.client.config_set("maxmemory-policy", "noeviction")
    assert levels(queue)["evicted keys"] == "error"


def test_a_replica_is_an_error(queue: Queue) -> None:
    queue.client.replicaof("127.0.0.1", "1")
    assert levels(queue)["role"] == "error"


def test_a_user_without_the_right_commands_is_told_so(queue: Queue) -> None:
    queue.client.acl_setuser(
        "app",
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        commands=["+@all", "-evalsha", "-config", "-info"],
    )
    url = queue.url.replace("redis://", "redis://app:secret@")
    examined = doctor(url, "--queue", queue.name, "--json")
    checks = {finding["check"]: finding for finding in json.loads(examined.stdout)["findings"]}
    assert (checks["scripts"]["level"], checks["server"]["level"]) == ("error", "note")
    assert examined.exit_code == 1
    assert "secret" not in examined.output


def test_a_server_that_is_away_is_exit_code_3_and_the_machine_is_examined_all_the_same() -> None:
    examined = doctor("redis://127.0.0.1:1/0", "--json")
    assert examined.exit_code == 3
    checks = {finding["check"]: finding for finding in json.loads(examined.stdout)["findings"]}
    assert checks["redis"]["level"] == "error"
    assert "pagemill worker" in checks["redis"]["remedy"]
    assert "versions" in checks


def test_jobs_that_nobody_serves_a_pause_and_dead_letters_are_warnings(queue: Queue) -> None:
    assert levels(queue)["workers"] == "warning"
    queue.submit("a", model="nobody-has-it")
    queue.submit("b")
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",))))
    queue.fail(queue.pull_one(), "dead")
    queue.run(registry.set_paused(queue.name, True))
    assert "1 job is dead" in doctor(queue.url, "--queue", queue.name).stdout
    told = levels(queue)
    assert (told["models"], told["queue"], told["dead letters"]) == ("warning", "warning", "warning")
    assert told["workers"] == "ok"
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",), state="unhealthy")))
    assert levels(queue)["workers"] == "error"


@pytest.mark.slow
def test_jobs_that_name_a_revision_without_a_worker_are_a_warning(queue: Queue) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",), revision="r1")))
    queue.submit("served", revision="r1")
    assert levels(queue)["revisions"] == "ok"
    queue.submit("a", "b", revision="r0")
    told = levels(queue)
    assert (told["revisions"], told["models"]) == ("warning", "ok")
    assert "m at r0 (2)" in doctor(queue.url, "--queue", queue.name).stdout
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w2", models=("m",), revision="r0")))
    assert levels(queue)["revisions"] == "ok"


def test_jobs_that_need_what_no_worker_knows_are_a_warning(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    queue.commit(queue.pull_one())
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",))))
    told = levels(queue)
    assert (told["features"], told["models"]) == ("warning", "ok")
    assert "m needs after (1)" in doctor(queue.url, "--queue", queue.name).stdout
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w2", models=("m",), knows="1+after+store")))
    assert levels(queue)["features"] == "ok"


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "6.2.5"}, "ok"),
        ({"redis_version": "8.4.0"}, "ok"),
        ({"redis_version": "5.0.7"}, "error"),
        ({"redis_version": "9.0.0"}, "warning"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.0"}, "ok"),
        ({}, "note"),
    ],
)
def test_versions(info: dict[str, Any], level: str) -> None:
    assert server_checks.version(info).level == level


@pytest.fixture
def admin(queue: Queue) -> Iterator[redis.Redis]:
    """A client that keeps all permissions regardless of the default user."""
    queue.client.execute_command("ACL", "SETUSER", "admin", "on", ">secret", "~*", "&*", "+@all")
    with redis.Redis.from_url(queue.url.replace("redis://", "redis://admin:secret@")) as client:
        yield client


@pytest.mark.parametrize(
    ("rules", "level"),
    [
        ("on nopass ~* &* +@all", "ok"), ("off ~* &* +@all", "ok"),
        ("off ~pagemill:* +@all -@dangerous", "ok"), ("off", "error"), ("on nopass ~* &* +ping", "error"),
        ("off ~* +@all -select", "error"), ("off ~another:* +@all", "error"), ("off %R~* +@all", "error"),
    ],
)  # fmt: skip
def test_default_user_must_have_the_permissions_of_a_replay(
    admin: redis.Redis, rules: str, level: str
) -> None:
    admin.execute_command("ACL", "SETUSER", "default", "reset", *rules.split())
    info = {"redis_version": "7.0.15", "aof_enabled": 1}
    found = server_checks.default_user(admin, "q", info)
    assert found.level == level
    if level == "error":
        remedy = "ACL SETUSER default off ~* &* +@all"
        assert remedy in found.remedy
        admin.execute_command(*remedy.split())
        assert server_checks.default_user(admin, "q", info).level == "ok"


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "6.2.14"}, "ok"),
        ({"redis_version": "7.0.0"}, "error"),
        ({"redis_version": "8.2.3"}, "error"),
        ({"redis_version": "8.6.0"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.7"}, "error"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.1"}, "error"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.1", "aof_enabled": 0}, "ok"),
        ({}, "error"),
    ],
)
def test_locked_default_user_is_an_error_on_affected_versions(
    admin: redis.Redis, info: dict[str, Any], level: str
) -> None:
    admin.execute_command("ACL", "SETUSER", "default", "reset")
    found = server_checks.default_user(admin, "q", {"aof_enabled": 1} | info)
    assert found.level == level


def test_default_user_that_cannot_be_checked_is_a_note(queue: Queue) -> None:
    queue.client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-acl"])
    found = server_checks.default_user(
        queue.client, queue.name, {"redis_version": "7.0.15", "aof_enabled": 1}
    )
    assert found.level == "note"
    assert "ACL GETUSER default" in found.remedy
    assert "user default off ~* &* +@all" in found.remedy


def test_a_clock_that_is_off_is_found(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = server_checks.time.time
    for shift, level in ((5.0, "warning"), (120.0, "error")):
        monkeypatch.setattr(server_checks.time, "time", lambda shift=shift: real() - shift)
        found = server_checks.clock_skew(queue.client)
        assert (found.level, "ahead of" in found.message) == (level, True)


def test_the_port_is_free_a_worker_s_or_somebody_else_s() -> None:
    class Worker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"ok": false, "state": "draining", "worker": "w1"}')

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Worker) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        found = machine_checks.http_port(server.server_port)
        server.shutdown()
        thread.join()
    assert (found.level, "worker w1, draining" in found.message) == ("ok", True)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert machine_checks.http_port(other.getsockname()[1]).level == "note"
    assert "is free" in machine_checks.http_port(_free_port()).message


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_control_group_s_limit_counts_where_it_is_the_lower_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    monkeypatch.setattr(machine_checks, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_checks, "CGROUP", tmp_path)
    assert machine_checks.memory_limit().message == "32.0 GiB of 64.0 GiB available"
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    limited = machine_checks.memory_limit()
    assert (limited.level, limited.message) == (
        "warning",
        "the control group allows 4.0 GiB, 1.0 GiB of it free",
    )
    (tmp_path / "memory.stat").write_text(
        f"anon 5\ninactive_file {2 * 2**30}\n"
    )  # a model file's cached pages
    assert machine_checks.memory_limit().message == "the control group allows 4.0 GiB, 3.0 GiB of it free"


@pytest.mark.parametrize(
    ("script", "level"),
    [
        ("echo 'NVIDIA H200, 143771 MiB, 0 MiB, 580.1'", ("ok", "warning")),
        ("echo 'No devices were found'; exit 6", ("warning",)),
    ],
)
def test_gpus_are_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, level: tuple[str, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine_checks.gpu().level in level
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert machine_checks.gpu().level == "note"


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cli_doctor.print_findings([Finding("port", "warning", "taken [by] a stranger", "choose another")])
    shown = capsys.readouterr().out
    assert "taken [by] a stranger" in shown
    assert "-> choose another" in shown
