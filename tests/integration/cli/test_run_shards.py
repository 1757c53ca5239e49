"""`pagemill run` over several files, as users type it: killed at any point, and restarted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagemill.producer.wire.calls import registry
from tests.integration.cli.test_run import Finished, environment, pagemill, worker
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

__all__ = ["pagemill", "worker"]  # fixtures
SIZES = (40, 0, 1, 79)
OPTIONS = ("--template", "{{ text }}", "--no-chat", "--max-tokens", "20", "--model", "echo")


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for index, size in enumerate(SIZES):
        texts = pyarrow.array([f"{index}.{n}" for n in range(size)], pyarrow.string())
        parquet.write_table(
            pyarrow.table({"text": texts}), folder / f"part-{index}.parquet", row_group_size=7
        )


def check(folder: Path) -> None:
    """Check that each file has its rows once and in order, and that the list of files agrees."""
    manifest = json.loads((folder / "_SUCCESS").read_text())
    assert [file["rows"] for file in manifest["files"]] == list(SIZES)
    assert manifest["rows"] == manifest["succeeded"] == sum(SIZES)
    for index, file in enumerate(manifest["files"]):
        table = parquet.read_table(folder / file["name"])
        expected = [f"{index}.{n}" for n in range(SIZES[index])]
        assert table["text"].to_pylist() == table["output"].to_pylist() == expected


@pytest.mark.parametrize("victim", ["run", "worker", "both"])
def test_killed_and_started_again(
    victim: str, pagemill: Callable[..., Finished], tmp_path: Path, client: QueueClient
) -> None:
    write_shards(tmp_path / "in")
    place = environment(client.url, client.queue)
    slow = (
        *("worker", "--model", "echo:20", "--option", "http_port=0"),
        *("--option", "lease_s=2", "--option", "renew_s=0.3"),
    )
    command = ("run", "in", "--out", "labeled/", "--window", "10", *OPTIONS)
    with started(slow, tmp_path, place) as worker, started(command, tmp_path, place) as run:
        eventually(lambda: succeeded(client, client.queue) > 5 or run.poll() is not None, "some rows")
        assert run.poll() is None
        assert not (tmp_path / "labeled").exists()
        for process in {"run": [run], "worker": [worker], "both": [run, worker]}[victim]:
            process.kill()
            process.wait(timeout=PATIENCE_S)
        worker.kill()
        with running_worker(worker_config(client.url, client.queue)):
            if victim == "worker":
                assert run.wait(timeout=PATIENCE_S) == 0
            again = pagemill(*command, "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert (report["rows"], report["succeeded"]) == (sum(SIZES), sum(SIZES))
    check(tmp_path / "labeled")
    beside = {"in", "labeled", "labeled.run.json", "labeled.report.html", "labeled.report.json"}
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == beside


@contextmanager
def started(
    command: tuple[str, ...], folder: Path, place: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block is left."""
    with subprocess.Popen(
        [sys.executable, "-m", "pagemill", *command], cwd=folder, env=place, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def succeeded(client: QueueClient, queue_name: str) -> int:
    return int(registry.stats(client.run, queue_name).counts.get("succeeded", 0))


def test_a_pattern_in_and_a_pattern_out(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path
) -> None:
    write_shards(tmp_path / "in")
    done = pagemill(
        "run", "in/part-*.parquet", "--out", "out/rows-{shard}.jsonl", "--rows-per-file", "50", *OPTIONS
    )
    assert done.returncode == 0, done.stderr
    rows = [len((tmp_path / f"out/rows-0000{n}.jsonl").read_text().splitlines()) for n in range(3)]
    assert rows == [50, 50, 20]
    assert (tmp_path / "out.report.html").exists()
    assert pagemill("run", "in", "--out", "out/rows-{shard}.jsonl", "--dry-run", *OPTIONS).returncode == 0


def test_several_files_and_a_mix_of_columns(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.csv").write_text("text\ny\n")
    done = pagemill("run", "a.csv", "b.csv", "--out", "out.csv", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
    (tmp_path / "b.csv").write_text("txt\ny\n")
    for options in ([], ["--dry-run"]):
        mixed = pagemill("run", "a.csv", "b.csv", "--out", "new.csv", *OPTIONS, *options)
        assert mixed.returncode == 2
        assert "b.csv has no column 'text', which a.csv has" in mixed.stderr
    assert not (tmp_path / "new.csv.partial").exists()
