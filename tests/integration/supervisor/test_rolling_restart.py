"""Rolling restarts with jobs and requests in flight."""

from __future__ import annotations

import http.client
import json
import random
import signal
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pagemill.supervisor.control import ask
from pagemill.supervisor.devices import divided_threads
from tests.chaos import invariants
from tests.engine.tiny_model import save_tiny_llama
from tests.integration.supervisor.conftest import Start, Up
from tests.worker.harness import QueueClient, eventually

BARE = ("--no-gateway", "--no-exporter")


class Watch:
    """How many workers were ready, at every look."""

    def __init__(self, up: Up) -> None:
        self.fewest = 99
        self._up = up
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            members = self._up.status()["members"]
            if members:
                ready = sum(one["state"] == "ready" for one in members if one["kind"] == "worker")
                self.fewest = min(self.fewest, ready)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()


def submit_some(client: QueueClient, jobs: int) -> tuple[list[str], list[str]]:
    """Jobs of 3 to 8 s."""
    texts = [f"{i:03d} " * random.Random(i).randint(150, 400) for i in range(jobs)]
    requests = ({"prompt": text, "max_tokens": len(text)} for text in texts)
    return client.submit(*requests, batch_id="all"), texts


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_job_is_lost_and_one_worker_at_most_is_away(
    workers: int, start: Start, client: QueueClient
) -> None:
    up = start("--workers", str(workers), *BARE, "--option", "drain_grace_s=0.3")
    before = up.wait_ready()
    ids, texts = submit_some(client, 60)
    eventually(lambda: client.counts("all").running == workers * 16, "all rows to be taken")
    with Watch(up) as watch:
        *events, end = ask(up.run_dir, command="restart")
    assert end == {"ok": True}, events
    assert watch.fewest == workers - 1
    after = up.members()
    assert {name: one["starts"] for name, one in after.items()} == dict.fromkeys(before, 2)
    assert all(after[name]["pid"] != before[name]["pid"] for name in before)
    assert [after[name]["url"] for name in before] == [before[name]["url"] for name in before]
    assert up.lines("handing back"), "jobs were in flight"
    invariants.check_echoes(invariants.check(client, ids), texts)
    up.signal(signal.SIGTERM)
    assert up.wait() == 0


@pytest.mark.slow
def test_a_hang_up_restarts_all_and_the_gateway_refuses_nobody(start: Start, client: QueueClient) -> None:
    """SIGHUP, without a terminal; and clients of the gateway that connect anew for each request."""
    up = start("--workers", "2")
    before = up.wait_ready()
    place = urlsplit(before["gateway"]["url"])
    answers: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
            body = json.dumps({"model": "echo", "prompt": "hello", "max_tokens": 5})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answers.append(connection.getresponse().status)
            connection.close()

    client_thread = threading.Thread(target=ask)
    client_thread.start()
    up.signal(signal.SIGHUP)
    eventually(lambda: up.lines("rolling restart: all are restarted"), "the restart")
    count = len(answers)
    eventually(lambda: len(answers) > count, "an answer of the new gateway")
    is_over.set()
    client_thread.join()
    assert set(answers) == {200}
    assert {one["starts"] for one in up.members().values()} == {2}


@pytest.mark.slow
def test_new_settings_come_with_it_and_bad_ones_stop_it(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "up.toml"
    config.write_text("max_backoff_s = 0.5\n[worker]\nmax_num_batched_tokens = 128\n")
    up = start("--workers", "2", *BARE, "--config", str(config))
    before = up.wait_ready()

    config.write_text("[worker]\nmax_num_batched_tokens = 'many'\n")
    refused = up.run("restart")
    assert refused.returncode == 1
    assert "max_num_batched_tokens" in refused.stderr
    assert "nothing was restarted" in refused.stderr

    # What only a start shows: an address that is not this machine's.
    config.write_text("max_backoff_s = 0.5\nhttp_host = '192.0.2.1'\n")
    halted = up.run("restart")
    assert halted.returncode == 1
    assert "halted: the new worker-0 ended 3 times (exit code 2)" in halted.stderr
    assert "Not restarted: worker-1" in halted.stderr
    after = up.wait_ready()
    assert after["worker-1"]["pid"] == before["worker-1"]["pid"]
    assert after["worker-0"]["url"] == before["worker-0"]["url"]

    config.write_text("[worker]\nlog_level = 'debug'\n")
    assert "above the tables" in up.run("restart").stderr
    config.write_text("log_level = 'debug'\n")
    assert up.run("restart").returncode == 0
    assert up.lines(r"worker-1 \| \S+ \[debug")


@pytest.mark.slow
def test_a_real_model_is_restarted(start: Start, client: QueueClient, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "tiny")
    up = start("--workers", "2", *BARE, "--option", "skip_tokenizer_init=true", model=str(tmp_path / "tiny"))
    members = up.wait_ready(patience_s=590)  # compiled kernels may not be there yet
    assert {one["threads"] for one in members.values()} == {divided_threads(2)}
    jobs = [
        {
            "model": "tiny",
            "prompt_token_ids": [5, 6, 7 + i % 8, 7 + i // 8],
            "max_tokens": 40,
            "ignore_eos": True,
            "temperature": 0,
        }
        for i in range(60)
    ]
    first = client.wait(client.submit(*jobs))
    ids = client.submit(*jobs, batch_id="all")
    assert list(ask(up.run_dir, command="restart"))[-1] == {"ok": True}
    tokens = [
        [result.token_ids for one in ends if (result := one.value())] for ends in (first, client.wait(ids))
    ]
    assert len(tokens[0]) == 60
    assert tokens[0] == tokens[1]
