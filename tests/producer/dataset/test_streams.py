"""Streaming input: it is read as far as needed, kept in a file, and read again from there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path, PurePath
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DiskError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import open_source
from pagemill.producer.dataset.tables.streams import CHUNK_BYTES, Stream
from tests.conftest import run_python
from tests.producer.dataset.test_run import counting_worker
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker


class Endless(io.RawIOBase):
    """An endless stream of numbered lines."""

    given = 0

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        line = json.dumps({"text": "x" * 90}).encode() + b"\n"
        self.given += count
        return (line * (count // len(line) + 1))[: count // len(line) * len(line)]


def test_it_is_read_only_as_far_as_somebody_asks() -> None:
    endless = Endless()
    stream = Stream(endless, PurePath("rows.jsonl"), "a pipe")
    source = open_source(stream)
    first = source.rows()
    assert [next(first).number for _ in range(10)] == list(range(1, 11))
    assert endless.given == CHUNK_BYTES
    assert source.count() is None
    second = source.rows()
    assert [next(second).fields for _ in range(20_000)] == [{"text": "x" * 90}] * 20_000
    asked = endless.given
    assert [next(first).number for _ in range(10_000)][-1] == 10_010
    assert endless.given == asked, "what one reader has read is there for the other"
    stream.close()


@pytest.mark.slow
def test_memory_does_not_grow_with_it() -> None:
    endless = Endless()
    stream = Stream(endless, PurePath("rows.jsonl"), "a pipe")
    rows = open_source(stream).rows()
    tracemalloc.start()
    for _ in range(60_000):
        next(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert endless.given >= 6 * CHUNK_BYTES
    assert peak < 4 * CHUNK_BYTES
    stream.close()


def test_the_count_is_known_once_all_is_read() -> None:
    stream = Stream(io.BytesIO(b'text\na\n"b\nc"\n'), PurePath("rows.csv"), "a pipe", b"")
    source = open_source(stream)
    assert source.count() is None
    assert [row.fields for row in source.rows()] == [{"text": "a"}, {"text": "b\nc"}]
    assert source.count() == 2
    stream.close()


@pytest.mark.slow
def test_a_stream_that_breaks_off_stops_the_run_and_loses_nothing(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    class Breaking(io.BytesIO):
        def read1(self, count: int | None = -1) -> bytes:
            if data := super().read1(200):
                return data
            raise ConnectionResetError("by https://key:secret@host")

    lines = b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(1_200))

    def run(source: Any) -> Any:
        stream = Stream(source, PurePath("rows.jsonl"), "a pipe")
        pipeline = Pipeline("{{ text }}", model="m", chat=False)
        try:
            with Producer(valkey_url, queue=queue_name) as producer:
                return pipeline.run(
                    (row.fields for row in open_source(stream).rows()),
                    out=tmp_path / "out.jsonl", producer=producer,
                )  # fmt: skip
        finally:
            stream.close()

    with counting_worker(valkey_url, queue_name) as ran:
        with pytest.raises(DiskError, match=r"a pipe broke off after .* \(ConnectionResetError\)") as failed:
            run(Breaking(lines))
        assert "secret" not in str(failed.value)
        assert run(io.BytesIO(lines)).succeeded == 1_200
    assert set(ran.values()) == {1}


def test_a_full_disk_is_told_from_a_broken_stream(tmp_path: Path) -> None:
    """In a process whose files must not grow."""
    program = (
        "import io, resource, signal\n"
        "from pathlib import PurePath\n"
        "from pagemill.producer.dataset.errors import DiskError\n"
        "from pagemill.producer.dataset.tables.streams import Stream\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    Stream(io.BytesIO(bytes(300_000)), PurePath('x.jsonl'), 'a pipe').size()\n"
        "except DiskError as error:\n    print(error)\n"
    )
    settings = os.environ | {"TMPDIR": str(tmp_path)}
    done = run_python("-c", program, env=settings)
    assert done.stdout.startswith(
        f"{tmp_path} has no room for what was read of a pipe (File too large): name another"
    )


@pytest.mark.slow
def test_work_on_standard_input_begins_before_its_end(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    """In addition, the log counts rows without a total."""
    ran: list[str] = []

    def answer(queue: Queue, pulled: Any) -> None:
        ran.append(pulled.job_id)
        queue.commit(pulled, "yes")

    command = [
        sys.executable, "-m", "pagemill", "run", "-", "--out", "out.jsonl", "--template", "{{ text }}", "--no-chat",
        "--model", "m", "--redis-url", valkey_url, "--queue", queue_name,
    ]  # fmt: skip
    with scripted_worker(valkey_url, queue_name, answer):
        run = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PAGEMILL_STATE_DIR": str(tmp_path / "state")},
        )  # fmt: skip
        assert run.stdin is not None
        for number in range(1_200):
            run.stdin.write(json.dumps({"text": f"row {number}"}).encode() + b"\n")
        run.stdin.flush()
        give_up = time.monotonic() + 60
        while len(ran) < 1_000 and run.poll() is None:
            assert time.monotonic() < give_up, "nothing runs before the input ends"
            time.sleep(0.01)
        for number in range(1_200, 1_500):
            run.stdin.write(json.dumps({"text": f"row {number}"}).encode() + b"\n")
        said, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors.decode()
    assert len(ran) == 1_500
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1_500
    assert b"1,500 = 1,500 done" in said
