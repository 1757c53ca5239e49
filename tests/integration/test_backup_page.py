"""docs/backup.md: its commands save, restore and move a queue, with waiting and finished jobs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pagemill import JobHandle, Producer
from tests.conftest import ROOT, RedisServer, server_binary
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "backup.md").read_text(encoding="utf-8")
BINARIES = {"valkey": "valkey-server", "redis62": "redis-server"}
OLD_PORT = 6379


def commands(title: str) -> list[list[str]]:
    """The words of the redis-cli commands in a section, after the URL."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^ *redis-cli -u \S+ (.+)$", section, re.MULTILINE)
    assert found, title
    return [line.split() for line in found]


def run(server: RedisServer, words: list[str]) -> Any:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return client.execute_command(*words)


def info(server: RedisServer, section: str) -> dict[str, Any]:
    with redis.Redis.from_url(server.url) as client:
        return dict(client.info(section))


@pytest.fixture(params=BINARIES)
def binary(request: pytest.FixtureRequest) -> Path:
    return server_binary(BINARIES[request.param])


@pytest.fixture
def server(binary: Path, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(binary, tmp_path / "old") as server:
        yield server


def submitted(server: RedisServer) -> dict[str, str]:
    """Jobs by state: one that has finished, one that waits, one that is delayed."""
    with Producer(server.url) as producer:
        with running_worker(worker_config(server.url, "default")):
            finished = producer.submit(prompt="finished", model="echo", max_tokens=8)
            assert finished.result(timeout=PATIENCE_S).text == "finished"
        waiting = producer.submit(prompt="waiting", model="echo", max_tokens=8, idempotency_key="k")
        delayed = producer.submit(prompt="delayed", model="echo", delay=1_000_000)
    return {"finished": finished.id, "waiting": waiting.id, "delayed": delayed.id}


def check_that_all_is_there(server: RedisServer, ids: dict[str, str]) -> None:
    with Producer(server.url) as producer:
        handles: dict[str, JobHandle] = {name: producer.job(job_id) for name, job_id in ids.items()}
        assert handles["finished"].result(timeout=PATIENCE_S).text == "finished"
        assert handles["waiting"].status().state == "queued"
        assert handles["delayed"].status().state == "delayed"
        repeated = producer.submit(prompt="waiting", model="echo", max_tokens=8, idempotency_key="k")
        assert repeated.id == ids["waiting"]
        with running_worker(worker_config(server.url, "default")):
            assert handles["waiting"].result(timeout=PATIENCE_S).text == "waiting"


def test_a_backup_is_restored(server: RedisServer, binary: Path, tmp_path: Path) -> None:
    ids = submitted(server)
    save, _, where = commands("Back up a running server")
    run(server, save)
    eventually(lambda: not info(server, "persistence")["rdb_bgsave_in_progress"], "the snapshot")
    assert info(server, "persistence")["rdb_last_bgsave_status"] == "ok"
    folder = Path(run(server, where)["dir"])
    (tmp_path / "new").mkdir()
    shutil.copy(folder / "dump.rdb", tmp_path / "new")
    server.kill()

    (start,) = re.findall(r"^ *redis-server (.+)$", PAGE, re.MULTILINE)
    options = re.sub(r"--dir \S+", "", start).split()
    restored = RedisServer(binary, tmp_path / "new", tuple(options))
    restored.start()
    try:
        for words in commands("Restore"):
            run(restored, words)
        eventually(lambda: not info(restored, "persistence")["aof_rewrite_in_progress"], "the file")
        check_that_all_is_there(restored, ids)
        restored.kill()
        restored.options = ()  # as configured from now on: with an append-only file
        restored.start()
        with Producer(restored.url) as producer:
            assert producer.job(ids["waiting"]).result(timeout=PATIENCE_S).text == "waiting"
    finally:
        restored.stop()


def test_a_queue_moves_to_another_server(server: RedisServer, binary: Path, tmp_path: Path) -> None:
    ids = submitted(server)
    follow, _, promote = commands("Move a queue to another server")
    moved = RedisServer(binary, tmp_path / "moved")
    moved.start()
    try:
        run(
            moved,
            [word.replace("old", "127.0.0.1").replace(str(OLD_PORT), str(server.port)) for word in follow],
        )
        eventually(lambda: info(moved, "replication")["master_link_status"] == "up", "the replica")

        def is_level() -> bool:
            theirs = info(server, "replication")["master_repl_offset"]
            return bool(info(moved, "replication")["slave_repl_offset"] == theirs)

        eventually(is_level, "the last write")
        run(moved, promote)
        server.kill()
        check_that_all_is_there(moved, ids)
    finally:
        moved.stop()


def test_a_copy_of_a_stopped_server_s_directory_is_a_backup(binary: Path, tmp_path: Path) -> None:
    stopped = RedisServer(binary, tmp_path / "state")
    stopped.start()
    ids = submitted(stopped)
    stopped.stop()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    copy = RedisServer(binary, tmp_path / "copy")
    copy.start()
    try:
        check_that_all_is_there(copy, ids)
    finally:
        copy.stop()
