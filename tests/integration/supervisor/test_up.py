"""`pagemill up`: one command for a host's workers, gateway and exporter: their startup, failures and shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from tests.integration.supervisor.conftest import Start, is_alive
from tests.worker.harness import QueueClient, eventually, get

pytestmark = pytest.mark.slow

LONG = {"prompt": "0123456789" * 200, "max_tokens": 2000}
"""Ten seconds of echo:5."""
BARE = ("--no-gateway", "--no-exporter")


def test_all_of_a_host_in_one_command(start: Start, queue_name: str, tmp_path: Path) -> None:
    """With an embedded server, which outlives every worker, and not the supervisor."""
    up = start("--workers", "2", url=None)
    members = up.wait_ready()
    assert [member["kind"] for member in members.values()] == ["worker", "worker", "gateway", "exporter"]
    urls = [member["url"] for member in members.values()]
    assert len(set(urls)) == 4
    for name, series in (
        ("worker-0", b"pagemill_"),
        ("worker-1", b"pagemill_"),
        ("exporter", b"pagemill_queue"),
    ):
        status, body = get(f"{members[name]['url']}/metrics")
        assert (status, series in body) == (200, True)
    assert get(f"{members['gateway']['url']}/readyz")[0] == 200
    for name in members:
        assert up.lines(rf"(?m)^{name} +\| "), f"no line of {name}"

    (server,) = up.lines(r"started the embedded Valkey at (\S+)")
    with Producer(server, queue=queue_name) as producer:
        assert producer.submit(prompt="hello", model="echo", max_tokens=5).result(timeout=60).text == "hello"

    shown = up.run("status")
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in (*members, *urls))
    document = json.loads(up.run("status", "--json").stdout)
    assert {member["pid"] for member in document["members"]} == {member["pid"] for member in members.values()}
    for path, mode in (
        (up.run_dir, 0o700),
        (up.run_dir / "control.sock", 0o600),
        (up.run_dir / "state.json", 0o600),
    ):
        assert stat.S_IMODE(path.stat().st_mode) == mode

    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not any(is_alive(pid) for pid in up.seen)
    assert up.run("status").returncode == 1
    assert not (tmp_path / "state" / "server.json").exists()


def test_a_killed_worker_is_started_again_and_no_job_is_lost(start: Start, client: QueueClient) -> None:
    up = start("--workers", "2", *BARE)
    members = up.wait_ready()
    ids = client.submit(
        *({"prompt": "0123456789" * 30, "max_tokens": 300} for _ in range(20)), batch_id="all"
    )
    eventually(lambda: client.counts("all").running >= 10, "jobs to run")
    os.kill(members["worker-0"]["pid"], signal.SIGKILL)
    eventually(lambda: up.members().get("worker-0", {}).get("starts") == 2, "its successor")
    again = up.wait_ready()["worker-0"]
    assert again["url"] == members["worker-0"]["url"], "its port is its own"
    assert again["last_end"] == "killed by SIGKILL"
    assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}
    assert client.redis.llen(f"pagemill:{{{client.queue}}}:bfeed:all") == len(ids)


def test_children_do_not_outlive_a_killed_supervisor(start: Start, client: QueueClient) -> None:
    up = start("--workers", "2", "--no-gateway", "--option", "drain_grace_s=0")
    members = up.wait_ready()
    client.submit(*(LONG for _ in range(32)))
    eventually(lambda: client.stats().counts.get("running", 0) == 32, "both workers to be full")
    frozen = members["worker-1"]["pid"]
    os.kill(frozen, signal.SIGSTOP)  # the kernel's SIGTERM waits until it continues
    up.signal(signal.SIGKILL)
    up.wait()
    others = [member["pid"] for member in members.values() if member["pid"] != frozen]
    eventually(lambda: not any(is_alive(pid) for pid in others), "the children to end")
    assert client.stats().counts.get("queued", 0) >= 1, "the drained worker hands its jobs back"
    assert is_alive(frozen)

    second = start("--workers", "2", "--no-gateway", PAGEMILL_STOP_TIMEOUT_S="2")
    second.wait_ready()
    assert not is_alive(frozen), "it held a device and a port"
    assert second.lines("of a supervisor that was killed does not end; killing it")


def test_one_run_directory_has_one_supervisor(start: Start) -> None:
    up = start("--workers", "1", *BARE)
    up.wait_ready()
    second = up.run("--model", "echo", *BARE)
    assert second.returncode == 2
    assert "another pagemill up runs with" in second.stderr
    assert up.members()["worker-0"]["state"] == "ready"


def test_a_second_signal_hurries(start: Start, client: QueueClient) -> None:
    up = start("--workers", "1", *BARE, "--option", "drain_grace_s=600", "--option", "shutdown_s=900")
    up.wait_ready()
    client.submit(LONG | {"max_tokens": 100_000, "ignore_eos": True})
    eventually(lambda: client.stats().counts.get("running", 0) == 1, "the job to run")
    up.signal(signal.SIGTERM)
    eventually(lambda: up.lines("draining: 1 jobs"), "the drain")
    assert up.members()["worker-0"]["state"] in ("ready", "draining")
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert client.stats().counts.get("queued", 0) == 1


def test_a_child_that_does_not_end_is_killed(start: Start) -> None:
    up = start("--workers", "1", *BARE, PAGEMILL_STOP_TIMEOUT_S="1")
    pid = up.wait_ready()["worker-0"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert up.run("stop").returncode == 0
    assert up.wait() == 1
    assert not is_alive(pid)
    assert up.lines("did not end in time; killing it")


def test_a_child_that_hangs_is_replaced(start: Start) -> None:
    up = start("--workers", "1", *BARE, PAGEMILL_STOP_TIMEOUT_S="1", PAGEMILL_LIVENESS_S="0.5")
    pid = up.wait_ready()["worker-0"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: up.members().get("worker-0", {}).get("starts") == 2, "its successor")
    up.wait_ready()
    assert not is_alive(pid)
    assert up.lines("/healthz has failed for")


def test_systemd_is_told(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        up = start(
            "--workers", "1", *BARE, "--option", "drain_grace_s=0",
            NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="600000",
        )  # fmt: skip
        told: list[str] = []
        while told.count("WATCHDOG=1") < 3 or "READY=1" not in told:
            told.append(manager.recv(4096).decode())
        assert told[:2] == ["WATCHDOG=1", "STATUS=starting: 0 of 1 ready"]
        eventually(lambda: up.status()["state"] == "ready", "it to be ready")
        up.signal(signal.SIGTERM)
        told.clear()
        while "STOPPING=1" not in told:
            told.append(manager.recv(4096).decode())
        assert up.wait() == 0
    # A worker that used NOTIFY_SOCKET itself would be an impostor.
    assert "STATUS=ready: 1 of 1 ready" in told or up.lines("all ready")


def test_wrong_settings_end_it_with_a_line(tmp_path: Path) -> None:
    def refused(*words: str, **variables: str) -> str:
        command = [sys.executable, "-m", "pagemill", "up", "--run-dir", str(tmp_path / "run"), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | variables
        )
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return done.stderr

    assert "model" in refused()
    assert "/no/such" in refused("--model", "/no/such")
    assert "named twice" in refused("--model", "echo", "--devices", "0|0")
    assert "workers" in refused("--model", "echo", PAGEMILL_WORKERS="x")
    assert "no_such" in refused("--model", "echo", "--option", "no_such=1")
    assert "hmac_keys is a secret" in refused("--model", "echo", "--option", "hmac_keys=x")
    (tmp_path / "up.toml").write_text('model = "echo"\n[gateway]\nno_such = 1\n')
    assert "no-such" in refused(
        "--config", str(tmp_path / "up.toml"), "--gateway-port", "0", "--exporter-port", "0"
    )
    assert "too long" in refused("--model", "echo", "--run-dir", str(tmp_path / ("x" * 100)))
    assert not (tmp_path / "run" / "state.json").exists()


def test_a_worker_that_refuses_its_settings_at_the_first_start_ends_all(start: Start) -> None:
    """A fault that only the engine can detect: no supervisor's waiting resolves it."""
    up = start("--workers", "2", "--option", "http_host=192.0.2.1", *BARE)
    assert up.wait() == 2


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_logs_are_one_stream_with_a_field(start: Start) -> None:
    up = start("--workers", "1", "--log-format", "json")
    up.wait_ready()
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    told = records(up.log())
    assert {record["process"] for record in told} == {"up", "worker-0", "gateway", "exporter"}
    assert any(record["process"] == "worker-0" and "worker" in record for record in told)
